"""Logs that come in files, with ids that drift, and what was learned of them."""

import json
import random

from stampede.engine.periods.loop import train_incrementally

SCHEMA = """\
format: csv
label: click
ids:
  user: {min_count: 1}
  ad: {min_count: 1}
  site: {encode: hash, buckets: 7}
numbers:
  price: {transform: [standard]}
"""


def write_job(folder, schema=SCHEMA):
    """A configuration of a small job on `log*.csv`; its path."""
    folder.mkdir(exist_ok=True)
    (folder / "schema.yaml").write_text(schema)
    path = folder / "ads.yaml"
    path.write_text(
        f"data: {{kind: table, schema_file: {folder}/schema.yaml, path: '{folder}/log*.csv'}}\n"
        f"run: {{dir: {folder}/runs}}\n"
        "model: {name: deepfm, dim: 4, hidden: [8], dropout: 0}\n"
        "train: {batch_size: 64, log_every: 3, replay: 0}\n"
        "optim: {embedding: {lr: 1e-2, rows: all}}\n"
    )
    return path


def write_log(file, first_user, seed, rows=400, users=60):
    """Clicks of users `u<first_user>` and on."""
    drawn = random.Random(seed)
    with file.open("w") as log:
        log.write("click,user,ad,site,price\n")
        for _ in range(rows):
            user, ad = first_user + drawn.randrange(users), drawn.randrange(12)
            odds = 0.1 + 0.06 * (user * 7919 % 10)
            label = int(drawn.random() < odds)
            log.write(f"{label},u{user},a{ad},s{user % 5},{drawn.random():.3f}\n")


def write_logs(folder, starts, **options):
    """A job on a file of clicks for each first user; its path."""
    path = write_job(folder)
    for number, start in enumerate(starts, 1):
        write_log(folder / f"log{number}.csv", start, seed=number, **options)
    return path


def write_frames(folder, schema, frames):
    """A job on a file for each frame; its path."""
    path = write_job(folder, schema)
    for number, frame in enumerate(frames, 1):
        frame.to_csv(folder / f"log{number}.csv", index=False)
    return path


def train(path, overrides=(), on_bad_file="error", follow=False, prepare_only=False):
    """Train on all new files; also as a rank of several."""
    train_incrementally(path, list(overrides), on_bad_file, follow, prepare_only)


def period(folder, number):
    return folder / f"runs/ads/period_{number:04d}"


def lines(folder, kind="period"):
    """Lines of the periods without times."""
    text = (folder / "runs/ads/metrics.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return [
        {name: value for name, value in line.items() if not name.endswith(("seconds", "_bytes"))}
        for line in found
        if line["kind"] == kind
    ]
