"""Model quality: every shipped configuration of a real log against other projects' models.

Ours are launched as a user would, `python launch.py CONFIG data.path=LOG`, changing only paths, the
seed and the network's name. The others are scikit-learn's logistic regression, LightGBM and
FuxiCTR's DeepFM (peers/raw_logs.py). All read the same file and have the same training, validation
and test rows; choices are made on the validation part. Seconds are of the whole process from the
raw file to the scores, including tuning.

    python -m venv peers
    ls -d $PWD/.venv/lib/*/site-packages > $(ls -d peers/lib/*/site-packages)/project.pth
    peers/bin/pip install 'lightgbm>=4,<5' fuxictr==2.3.10
    python benchmarks/quality.py --python peers/bin/python
    python benchmarks/quality.py --logs criteo --subsets whole --peers lr --models lr fm --resume
    python benchmarks/quality.py --logs criteo --subsets whole --models deepfm --batches 4096 65536
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import yaml
from launched import run_program
from matplotlib.figure import Figure
from report import ROOT, Report, command_line, markdown
from tqdm import tqdm

from stampede import open_run
from stampede.data.schema.schema import CRITEO, Schema, avazu
from stampede.data.sources import open_source
from stampede.data.split import Assignment
from stampede.engine.config.load import load_config

PEER_PROGRAM = ROOT / "benchmarks/peers/raw_logs.py"
PEERS = {"lr": "scikit-learn LR", "lightgbm": "LightGBM", "fuxictr": "FuxiCTR DeepFM"}

TABLE = ROOT / "configs/table.yaml"


def _ids(*names: str) -> dict[str, dict[str, Any]]:
    return {name: {} for name in names}


class Log(NamedTuple):
    """A real log: its file in `--data`, the configuration shipped for it, its columns, its split.

    The columns are for configs/table.yaml.
    """

    file: str
    config: Path
    schema: Schema
    split: str = ""


LOGS = {
    "criteo": Log("criteo_kaggle_137k.tsv.gz", ROOT / "configs/criteo_kaggle.yaml", CRITEO),
    "avazu": Log("avazu_20k.csv.gz", ROOT / "configs/avazu.yaml", avazu(split_hour=True)),
    "movielens": Log("movielens_100k.csv.gz", TABLE, Schema.model_validate({
        "label": {"column": "rating", "at_least": 4},
        "ids": {**_ids("user_id", "age", "gender", "occupation", "zip", "movie_id", "year"),
                "genres": {"separator": "|"}},
        "time": {"column": "timestamp"},
    }), "sequential"),
    "adult": Log("adult.csv.gz", TABLE, Schema.model_validate({
        "label": {"column": "income", "positive": [">50K"]},
        "ids": _ids("workclass", "education", "marital_status", "occupation", "relationship",
                    "race", "sex", "native_country"),
        "numbers": _ids("age", "fnlwgt", "education_num", "capital_gain", "capital_loss",
                        "hours_per_week"),
    }), "random"),
    "flights": Log("flights_2013.csv.gz", TABLE, Schema.model_validate({
        "label": "late",
        "ids": _ids("carrier", "flight", "tailnum", "origin", "dest"),
        "numbers": _ids("sched_arr_time", "distance"),
        "time": {"column": "scheduled", "format": "iso8601"},
    }), "sequential"),
}  # fmt: skip
CONFIGS = list(dict.fromkeys([*(log.config.stem for log in LOGS.values()), TABLE.stem]))

# Networks for the whole first log; elsewhere only the configuration's own.
MODELS, MAIN = ("lr", "fm", "deepfm", "dcnv2", "wide_deep", "dcn"), ("criteo", "whole")

SUBSETS, QUICK_ROWS = {"whole": 1, "half": 2, "fifth": 5}, 3000

# Fields that identify a measurement.
_KEY = ("log", "rows", "contender", "seed", "data")


@dataclass(frozen=True)
class Rows:
    """Rows of a log, in a file of its format, and beside it a schema and the part of each row.

    Attributes:
        log: its name in `LOGS`.
        name: which rows: `whole`, `half 1`.
        file: the file, not compressed.
        counts: rows of the training, the validation and the test part.
        split: overrides that make any configuration split the rows in this way.
        digest: of the file and the parts.
    """

    log: str
    name: str
    file: Path
    counts: tuple[int, ...]
    split: tuple[str, ...]
    digest: str


@dataclass(frozen=True)
class Contender:
    """A model: a peer by its key in `PEERS`, or a configuration of ours with overrides."""

    name: str
    peer: str = ""
    config: Path | None = None
    overrides: tuple[str, ...] = ()


def quality(options: argparse.Namespace, report: Report) -> str:
    """AUC and logloss of all contenders."""
    if options.quick:
        options.seeds, options.subsets, options.models = 1, ["whole"], options.models or []
    for path in (options.data / LOGS[name].file for name in options.logs):
        if not path.exists():
            sys.exit(f"error: {path}: no such file; name the folder of the logs with --data")
    found: list[dict[str, Any]] = []
    if options.resume and options.out.exists():
        runs = json.loads(options.out.read_text()).get("runs", [])
        found = [run for run in runs if "failed" not in run]
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        measure(options, found, report, Path(scratch))
    report.failed = sorted({run["contender"] for run in found if "failed" in run})
    lines = [line for line in summarize(found) if (line["log"], line["rows"]) == MAIN]
    if lines := [line for line in lines if "failed" not in line]:
        draw(lines, options.out.with_suffix(".png"))
    return tables(report.found)


def measure(
    options: argparse.Namespace, found: list[dict[str, Any]], report: Report, scratch: Path
) -> None:
    """Make all requested measurements that are not yet among those found; failures are recorded."""
    known = {tuple(run[name] for name in _KEY) for run in found}
    runs = [
        (rows, one, seed)
        for log in options.logs
        for rows in write_subsets(log, options, scratch)
        for one in contenders(rows, options)
        for seed in range(1, options.seeds + 1 if one.peer != "lr" else 2)
    ]
    for rows, one, seed in tqdm(runs, unit="run", ncols=100):
        run = {"log": rows.log, "rows": rows.name, "parts": rows.counts, "contender": one.name}
        run |= {"seed": seed, "data": rows.digest}
        if tuple(run[key] for key in _KEY) in known:
            continue
        folder = scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            if one.peer:
                run |= run_peer(rows, one.peer, seed, options.python, folder)
            else:
                run |= train_ours(rows, one, seed, folder)
        except RuntimeError as failure:
            tqdm.write(f"{one.name} on {rows.log} {rows.name}: {failure}", sys.stderr)
            run["failed"] = str(failure).strip().splitlines()[-1][:300]
        found.append(run)
        report.add(runs=found)


def contenders(rows: Rows, options: argparse.Namespace) -> list[Contender]:
    """The contenders on some rows: logistic regression, ours, the other peers."""
    peers, configs, models = options.peers, options.configs, options.models
    is_main, ours = (rows.log, rows.name) == MAIN, []
    if models is None:
        models = list(MODELS) if is_main else []
    for config in dict.fromkeys((LOGS[rows.log].config, TABLE)):
        if config.stem not in configs:
            continue
        schema = [f"data.schema_file={rows.file.with_suffix('.yaml')}"] if config == TABLE else []
        overrides = (f"data.path={rows.file}", *schema, *rows.split)
        own = load_config(config, overrides).model.name
        for model in (models if config != TABLE else []) or [own]:
            named = () if model == own else (f"model.name={model}",)
            ours.append(Contender(f"{config.name} {model}", "", config, (*overrides, *named)))
        for batch in options.batches if is_main and config != TABLE else []:
            given = (*overrides, f"train.batch_size={batch}")
            ours.append(Contender(f"{config.name} {own}, batch {batch:,}", "", config, given))
    # FuxiCTR's settings are those that BARS found for these two logs.
    has_settings = LOGS[rows.log].config != TABLE
    others = [Contender(PEERS[p], p) for p in peers if p != "fuxictr" or has_settings]
    return [*others[: "lr" in peers], *ours, *others["lr" in peers :]]


def write_subsets(log: str, options: argparse.Namespace, scratch: Path) -> Iterator[Rows]:
    """The whole log, and random rows of it in their order, each in a file of the log's format."""
    schema = LOGS[log].schema
    with gzip.open(options.data / LOGS[log].file, "rb") as file:
        lines = file.read().splitlines(keepends=True)
    head, lines = ([], lines) if schema.columns else (lines[:1], lines[1:])
    if options.quick:
        lines = lines[:QUICK_ROWS]
    for subset in options.subsets:
        for draw in range(1, options.draws + 1 if subset != "whole" else 2):
            name, share = subset if subset == "whole" else f"{subset} {draw}", SUBSETS[subset]
            order = np.random.default_rng([share, draw]).permutation(len(lines))
            kept = np.sort(order[: len(lines) // share])
            file = scratch / f"{log}-{name.replace(' ', '-')}{'.tsv' if schema.columns else '.csv'}"
            file.write_bytes(b"".join([*head, *(lines[i] for i in kept)]))
            columns = schema.model_dump(mode="json", exclude_unset=True)
            file.with_suffix(".yaml").write_text(yaml.safe_dump(columns, sort_keys=False))
            yield divided(log, name, file, len(kept))


def divided(log: str, name: str, file: Path, count: int) -> Rows:
    """So many rows in a file, split as in the log's configuration."""
    of_log, named = LOGS[log], {}
    given = [f"data.path={file}", *([f"data.split={of_log.split}"] if of_log.split else [])]
    if of_log.config == TABLE:
        named = {"schema": str(file.with_suffix(".yaml"))}
        given.append(f"data.schema_file={named['schema']}")
    data = load_config(of_log.config, given).data
    source = open_source(data.kind, str(file), data, **named)
    parts = Assignment(source, [count]).parts(SimpleNamespace(numbers=np.arange(count), file=0))
    np.save(file.with_suffix(".npy"), parts)
    share = source.test_share if data.test_fraction is None else data.test_fraction
    split = {"test_fraction": share} | {
        key: getattr(data, key) for key in ("split", "validation_fraction", "seed")
    }
    digest = hashlib.sha256(file.read_bytes() + parts.tobytes()).hexdigest()[:12]
    counts = tuple(int((parts == part).sum()) for part in range(3))
    overrides = tuple(f"data.{key}={value}" for key, value in split.items())
    return Rows(log, name, file, counts, overrides, digest)


def train_ours(rows: Rows, contender: Contender, seed: int, scratch: Path) -> dict[str, Any]:
    """Results of a launcher's run in the epoch chosen on the validation part.

    Raises:
        RuntimeError: it failed, or split the rows differently.
    """
    place = [f"data.cache={scratch / 'cache'}", f"run.dir={scratch}", "run.name=run"]
    overrides = [*place, f"run.seed={seed}", *contender.overrides]
    done = run_program([ROOT / "launch.py", contender.config, *overrides])
    run = open_run(scratch / "run")
    test, validation, summary = run.metrics["test"], run.metrics["validation"], run.summary
    samples = summary["rows"]["test"]
    if samples != rows.counts[2]:
        raise RuntimeError(f"the run has {samples} test rows, the others {rows.counts[2]}")
    return {
        "seconds": done.seconds,
        "auc": test["auc"],
        "logloss": test["logloss"],
        "validation_auc": validation["auc"],
        "validation_logloss": validation["logloss"],
        "chosen": {"epoch": summary["best_epoch"], "of": summary["epochs"]},
        "train_seconds": summary["train_seconds"],
    }


def run_peer(rows: Rows, peer: str, seed: int, python: str, scratch: Path) -> dict[str, Any]:
    """Results of a peer.

    Raises:
        RuntimeError: it failed or is not installed.
    """
    command = [PEER_PROGRAM, peer, rows.log, rows.file, "--parts", rows.file.with_suffix(".npy")]
    done = run_program([*command, "--seed", seed, "--scratch", scratch], python=python)
    return {"seconds": done.seconds, **json.loads(done.said.strip().splitlines()[-1])}


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds and draws, in the order of the logs, the subsets and the contenders.

    `above_lr` is the mean over the draws of a contender's AUC minus scikit-learn's logistic
    regression's on the same rows. The standard error belongs to this mean; with one draw, to the
    mean AUC over the seeds.
    """
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for run in runs:
        of_subset = groups.setdefault((run["log"], run["rows"].split()[0]), {})
        of_subset.setdefault(run["contender"], []).append(run)
    lines = []
    for (log, subset), by_contender in groups.items():
        bars = _aucs(by_contender.get(PEERS["lr"], []))
        for contender, measured in by_contender.items():
            good = [run for run in measured if "failed" not in run]
            line = {"log": log, "rows": subset, "parts": measured[0]["parts"]}
            lines.append(line | {"contender": contender})
            if not good:
                lines[-1]["failed"] = measured[-1]["failed"]
                continue
            aucs = _aucs(good)
            above = [auc - bars[draw] for draw, auc in aucs.items() if draw in bars]
            spread = above if len(above) > 1 else [run["auc"] for run in good]
            several = len(spread) > 1 and contender != PEERS["lr"]
            lines[-1] |= {
                "runs": len(good),
                "draws": len(aucs),
                **{name: statistics.mean(run[name] for run in good)
                   for name in ("auc", "logloss", "validation_auc", "seconds")},
                "above_lr": statistics.mean(above) if above else None,
                "standard_error": statistics.stdev(spread) / math.sqrt(len(spread))
                if several else None,
            }  # fmt: skip
    return lines


def _aucs(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The mean AUC on each draw."""
    by_draw: dict[str, list[float]] = {}
    for run in runs:
        if "failed" not in run:
            by_draw.setdefault(run["rows"], []).append(run["auc"])
    return {draw: statistics.mean(aucs) for draw, aucs in by_draw.items()}


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Test AUC by the seconds from the raw file to the scores, a point for each contender."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="seconds from the raw log to scores, all told")
    axes.set_ylabel("test AUC")
    for line in lines:
        is_ours = line["contender"] not in PEERS.values()
        place = line["seconds"], line["auc"]
        axes.plot(*place, "o", color="tab:blue" if is_ours else "tab:gray")
        name = line["contender"].partition(".yaml ")[2] or line["contender"]
        axes.annotate(name, place, (6, 4), textcoords="offset points", fontsize=9)
    axes.margins(x=0.3, y=0.15)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def tables(found: dict[str, Any]) -> str:
    """The results as Markdown, a table for each log and subset."""
    sections: dict[tuple[str, str], tuple[str, list[list[Any]]]] = {}
    for line in summarize(found["runs"]):
        train, validation, test = line["parts"]
        draws = f", {line['draws']} draws" if line.get("draws", 1) > 1 else ""
        counts = f"{train:,} training, {validation:,} validation, {test:,} test rows{draws}"
        key = line["log"], line["rows"]
        _, rows = sections.setdefault(key, (f"**{' '.join(key)}**: {counts}", []))
        if "failed" in line:
            rows.append([line["contender"], f"failed: {line['failed'][:60]}", *[""] * 6])
            continue
        above = "" if line["above_lr"] is None else f"{line['above_lr']:+.4f}"
        error = "" if line["standard_error"] is None else f"{line['standard_error']:.4f}"
        row = [line["contender"], line["runs"], f"{line['auc']:.4f}", above, error]
        row += [f"{line['logloss']:.4f}", f"{line['validation_auc']:.4f}"]
        rows.append([*row, f"{line['seconds']:.1f}"])
    heads = ["contender", "runs", "test AUC", "above LR", "std. error", "logloss", "val. AUC"]
    heads.append("seconds")
    return "\n\n".join(f"{title}\n\n{markdown(heads, rows)}" for title, rows in sections.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = ROOT.parent / "shared/data"
    parser.add_argument("--data", type=Path, default=data, help="folder of the logs")
    which = {"logs": LOGS, "peers": PEERS, "configs": CONFIGS, "subsets": SUBSETS}
    for name, known in which.items():
        parser.add_argument(f"--{name}", nargs="*", choices=known, default=list(known))
    parser.add_argument("--draws", type=int, default=1, help="number of random halves and fifths")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1; LR has one")
    parser.add_argument(
        "--models",
        nargs="*",
        help=f"networks of the log's own configuration everywhere; default: {', '.join(MODELS)} on "
        "the whole Criteo sample, elsewhere the configuration's own",
    )
    parser.add_argument(
        "--batches",
        nargs="*",
        type=int,
        default=[],
        help="further runs of the whole Criteo sample with these batch sizes",
    )
    parser.add_argument("--python", default=sys.executable, help="has LightGBM and FuxiCTR")
    parser.add_argument("--resume", action="store_true", help="keep the results in --out")
    command_line(quality, parser=parser)
