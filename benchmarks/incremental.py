"""Incremental training against training once and from scratch; the time to give ids rows.

python benchmarks/incremental.py --log ../shared/data/criteo_kaggle_137k.tsv.gz
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from launched import run_program
from matplotlib.figure import Figure
from report import ROOT, Report, command_line, markdown, wrapped
from sklearn.metrics import log_loss, roc_auc_score
from timing import seconds_of
from tqdm import tqdm

from stampede import open_run
from stampede.data.learning.vocabulary import grown, nothing_known
from stampede.data.options import GrowthOptions

CONFIG = ROOT / "configs/criteo_kaggle.yaml"
PERIODS, FIRST_HALF = 12, 6
NAMES = {"incremental": "period after period", "once": "first half only", "anew": "anew each time"}

# Ids with a row, and ids that get one in a period.
SIZES = ((1_000_000, 100_000), (10_000_000, 1_000_000))


def incremental(options: argparse.Namespace, report: Report) -> str:
    """Three ways to train on a log, and the seconds in which new ids get their rows.

    The log is cut into twelve files, in its order. Three models that have not seen a file score
    each file of the second half: the model of `stampede incremental`, one trained on the first
    half, and one trained from scratch on all earlier files.
    """
    scale, rows = (100, 3000) if options.quick else (1, None)
    report.add(growth=[growing(kept // scale, new // scale) for kept, new in SIZES])
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report.add(**compared(cut(options.log, Path(folder), rows), Path(folder)))
    draw(report.found["periods"], options.out.with_suffix(".png"))
    return tables(report.found)


def growing(kept: int, new: int) -> dict[str, Any]:
    """Seconds to give new ids rows, with and without evicting others; half of the ids with a row
    occur in the period.
    """
    numbers = pl.int_range(kept, eager=True)
    before = grown(nothing_known(), [_counted(numbers)], 1, 1, GrowthOptions())
    occurring = pl.concat([numbers.gather_every(2), pl.int_range(kept, kept + new, eager=True)])
    found = {"kept": kept, "new": new}
    for name, most in (("seconds", None), ("evicting_seconds", kept)):
        given = before, [_counted(occurring)], 2, 1, GrowthOptions(max_rows=most)
        found[name] = statistics.median(seconds_of(lambda g=given: grown(*g)) for _ in range(3))
    return found


def _counted(numbers: pl.Series) -> pl.DataFrame:
    return pl.DataFrame({"value": numbers.cast(pl.String), "count": np.ones(len(numbers), int)})


def cut(log: Path, folder: Path, rows: int | None) -> list[Path]:
    """Cut the log into files of equal size, in its order."""
    opened = gzip.open if log.suffix == ".gz" else open
    with opened(log, "rb") as file:
        lines = file.readlines()[:rows]
    bounds = [len(lines) * number // PERIODS for number in range(PERIODS + 1)]
    files = [folder / f"log_{number:02d}.tsv" for number in range(1, PERIODS + 1)]
    for path, (first, last) in zip(files, pairwise(bounds), strict=True):
        path.write_bytes(b"".join(lines[first:last]))
    return files


def compared(files: list[Path], folder: Path) -> dict[str, Any]:
    """AUC, logloss and seconds of the three ways, for every period of the second half."""
    periods: list[dict[str, Any]] = []
    seconds = dict.fromkeys(NAMES, 0.0)
    seconds["once"] = train(files[:FIRST_HALF], folder / "once")
    given = folder / "given"
    given.mkdir()
    for number, file in enumerate(tqdm(files, disable=None), 1):
        if number > FIRST_HALF:
            shutil.rmtree(folder / "anew", ignore_errors=True)
            seconds["anew"] += train(files[: number - 1], folder / "anew")
            runs = {way: folder / way for way in NAMES}
            runs["incremental"] = folder / f"criteo_kaggle/period_{number - 1:04d}"
            scored = {way: score(runs[way], file) for way in NAMES}
            periods.append({"period": number, **scored})
        # One file at a time, so that the model before it can be scored.
        os.link(file, given / file.name)
        # On from the model before: anew is a way of its own.
        place = (f"data.path={given}/*.tsv", f"run.dir={folder}", "train.replay=0")
        done = run_program(["-m", "stampede", "incremental", CONFIG, *place])
        seconds["incremental"] += done.seconds if number > FIRST_HALF else 0.0
    mean = {
        way: {m: statistics.fmean(p[way][m] for p in periods) for m in ("auc", "logloss")}
        for way in NAMES
    }
    return {"periods": periods, "mean": mean, "seconds_of_second_half": seconds}


def train(files: list[Path], folder: Path) -> float:
    """Seconds of training the shipped configuration; the last tenth chooses the epoch."""
    # The test part is unused here, but must not be empty.
    keys = ("data.test_fraction=0.001", "evaluate.compare_with_lr=false", "run.overwrite=true")
    where = (f"run.dir={folder.parent}", f"run.name={folder.name}")
    cache = f"data.cache={folder.parent}/cache"
    paths = f"data.path=[{', '.join(map(str, files))}]"
    return run_program([ROOT / "launch.py", CONFIG, paths, cache, *keys, *where]).seconds


def score(folder: Path, file: Path) -> dict[str, float]:
    """AUC and logloss of a file, by scikit-learn."""
    scores = open_run(folder).score(file)
    labels = np.array([int(line[:1]) for line in file.open("rb")])
    return {"auc": roc_auc_score(labels, scores), "logloss": log_loss(labels, scores)}


def draw(periods: list[dict[str, Any]], path: Path) -> None:
    """AUC over the periods, a line for each way."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    numbers = [p["period"] for p in periods]
    for (way, label), style in zip(NAMES.items(), ("o-", "s--", "^:"), strict=True):
        axes.plot(numbers, [p[way]["auc"] for p in periods], style, label=label)
    axes.set(xlabel="period", ylabel="AUC before training on it")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def tables(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for way, label in NAMES.items():
        mean, seconds = found["mean"][way], found["seconds_of_second_half"][way]
        rows.append([label, f"{mean['auc']:.4f}", f"{mean['logloss']:.4f}", f"{seconds:.0f}"])
    grown = "; ".join(
        f"{line['seconds']:.1f} for {line['new']:,} new ids in a table of {line['kept']:,} rows "
        f"that may grow, {line['evicting_seconds']:.1f} if it may not and they take the rows of "
        "others"
        for line in found["growth"]
    )
    parts = [
        "![AUC of the last six periods](../benchmarks/results/incremental.png)",
        markdown(["trained", "AUC", "logloss", "seconds, start-up included"], rows),
        wrapped(f"Seconds that it takes to give new ids their rows: {grown}."),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    log = ROOT.parent / "shared/data/criteo_kaggle_137k.tsv.gz"
    parser.add_argument("--log", type=Path, default=log, help="Criteo Kaggle's, or a sample")
    command_line(incremental, parser=parser)
