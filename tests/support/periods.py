"""Logs that come in files, with ids that drift, and what was learned of them."""

import json
import random

import polars as pl
import torch

from stampede.engine.checkpoint.retention import newest
from stampede.engine.periods import train_incrementally
from support.jobs import tensors_of

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

DIM = 4


def write_job(folder):
    """A configuration of a small job on `log*.csv`; its path."""
    folder.mkdir(exist_ok=True)
    (folder / "schema.yaml").write_text(SCHEMA)
    path = folder / "ads.yaml"
    path.write_text(
        f"data: {{kind: table, schema_file: {folder}/schema.yaml, path: '{folder}/log*.csv'}}\n"
        f"run: {{dir: {folder}/runs}}\n"
        "model: {name: deepfm, dim: 4, hidden: [8], dropout: 0}\n"
        "train: {batch_size: 64, log_every: 3}\n"
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


def train(path, overrides=(), on_bad_file="error", follow=False):
    """Train on all new files; also as a rank of several."""
    train_incrementally(path, list(overrides), on_bad_file, follow)


def lines(folder, kind="period"):
    """Lines of the periods without times."""
    text = (folder / "runs/ads/metrics.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return [
        {name: value for name, value in line.items() if not name.endswith(("seconds", "_bytes"))}
        for line in found
        if line["kind"] == kind
    ]


def period(folder, number):
    return folder / f"runs/ads/period_{number:04d}"


def tensors(folder, number):
    """All tensors after a period."""
    return tensors_of(newest(period(folder, number) / "checkpoints"))


def ids_of(folder, number, field):
    """Row of each id after a period."""
    file = period(folder, number) / f"inputs/learned/{field}.parquet"
    return {text: row for row, text in enumerate(pl.read_parquet(file)["value"], 2)}


def rows_of(found, field, row):
    """Weights and moments of a row."""
    begin = f"front.ebc.embedding_bags.t_{field}.weight"
    names = [f"model.{begin}", *(f"fused.{begin}.t_{field}.{m}" for m in MOMENTS)]
    return torch.stack([found[name][row] for name in names])


MOMENTS = ("momentum1", "exp_avg_sq")
