"""Incremental training against training once and from scratch; the cost of growing tables.

The log is cut into twelve files, in its order. Three models that have not seen a file score each
file of the second half: the model of `stampede incremental`, one trained on the first half, and one
trained from scratch on all earlier files.

    python benchmarks/incremental.py --log ../shared/data/criteo_kaggle_137k.tsv.gz
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from machine import CORES
from matplotlib.figure import Figure
from report import ROOT, begin, markdown, picture_path, wrapped
from sklearn.metrics import log_loss, roc_auc_score
from tqdm import tqdm

from stampede import open_run
from stampede.data.learning.vocabulary import grown, nothing_known
from stampede.data.options import GrowthOptions
from stampede.engine.plots import to_png
from stampede.files import write_file

CONFIG = ROOT / "configs/criteo_kaggle.yaml"
PERIODS, FIRST_HALF = 12, 6
NAMES = {"incremental": "period after period", "once": "first half only", "anew": "anew each time"}

# Ids with a row, and ids that get one in a period.
SIZES = ((1_000_000, 100_000), (10_000_000, 1_000_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, help="Criteo Kaggle's log or a sample of it")
    options, report = begin("incremental", parser)
    growth = [growing(kept // (100 if options.quick else 1), new // (100 if options.quick else 1))
              for kept, new in SIZES]  # fmt: skip
    report.add(growth=growth)
    for line in growth:
        print(
            f"{line['new']:,} new ids into {line['kept']:,} rows: {line['seconds']:.2f} s, "
            f"{line['evicting_seconds']:.2f} s where they take rows of others"
        )
    if options.log is not None:
        folder = options.folder / "incremental"
        shutil.rmtree(folder, ignore_errors=True)
        files = cut(options.log, folder, 3000 if options.quick else None)
        report.add(**compared(files, folder))
        write_file(picture_path(options.out), picture(report.found["periods"]))
        print(tables(report.found))
    report.close()


def growing(kept: int, new: int) -> dict[str, Any]:
    """Seconds to give new ids rows, with and without evicting others; half of the ids with a row
    occur in the period.
    """
    numbers = pl.int_range(kept, eager=True)
    before = grown(nothing_known(), [_counted(numbers)], 1, 1, GrowthOptions())
    occurring = pl.concat([numbers.gather_every(2), pl.int_range(kept, kept + new, eager=True)])
    found = {"kept": kept, "new": new}
    for name, most in (("seconds", None), ("evicting_seconds", kept)):
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            after = grown(before, [_counted(occurring)], 2, 1, GrowthOptions(max_rows=most))
            seconds.append(time.perf_counter() - start)
        assert len(after.vocabulary) == (most or kept + new)
        found[name] = statistics.median(seconds)
    return found


def _counted(numbers: pl.Series) -> pl.DataFrame:
    return pl.DataFrame({"value": numbers.cast(pl.String), "count": np.ones(len(numbers), int)})


def cut(log: Path, folder: Path, rows: int | None) -> list[Path]:
    """Cut the log into files of equal size, in its order."""
    folder.mkdir(parents=True)
    opened = gzip.open if log.suffix == ".gz" else open
    with opened(log, "rb") as file:
        lines = file.readlines()[:rows]
    bounds = [len(lines) * number // PERIODS for number in range(PERIODS + 1)]
    files = []
    for number, (first, last) in enumerate(pairwise(bounds), 1):
        files.append(folder / f"log_{number:02d}.tsv")
        files[-1].write_bytes(b"".join(lines[first:last]))
    return files


def compared(files: list[Path], folder: Path) -> dict[str, Any]:
    """AUC, logloss and seconds of the three ways, for every period of the second half."""
    periods: list[dict[str, Any]] = []
    seconds = dict.fromkeys(NAMES, 0.0)
    once = folder / "once"
    seconds["once"] = train(files[:FIRST_HALF], once)
    given = folder / "given"
    given.mkdir()
    for number, file in enumerate(tqdm(files, disable=None), 1):
        scored = {}
        if number > FIRST_HALF:
            anew = folder / "anew"
            shutil.rmtree(anew, ignore_errors=True)
            seconds["anew"] += train(files[: number - 1], anew)
            runs = {"incremental": _period(folder, number - 1), "once": once, "anew": anew}
            scored = {way: score(run, file) for way, run in runs.items()}
            periods.append({"period": number, **scored})
        # One file at a time, so that the model before it can be scored.
        os.link(file, given / file.name)
        took = command("incremental", f"data.path={given}/*.tsv", f"run.dir={folder}")
        seconds["incremental"] += took if number > FIRST_HALF else 0.0
    mean = {
        way: {m: statistics.fmean(p[way][m] for p in periods) for m in ("auc", "logloss")}
        for way in NAMES
    }
    return {"rows": sum(1 for f in files for _ in f.open("rb")), "periods": periods,
            "mean": mean, "seconds_of_second_half": seconds}  # fmt: skip


def _period(folder: Path, number: int) -> Path:
    return folder / f"criteo_kaggle/period_{number:04d}"


def train(files: list[Path], run: Path) -> float:
    """Train the shipped configuration on some files; the last tenth chooses the epoch."""
    paths = "[" + ", ".join(map(str, files)) + "]"
    # The test part is unused here, but must not be empty.
    keys = ("data.test_fraction=0.001", "evaluate.compare_with_lr=false", "run.overwrite=true")
    where = (f"run.dir={run.parent}", f"run.name={run.name}", f"data.cache={run.parent}/cache")
    return command("train", f"data.path={paths}", *keys, *where)


def command(name: str, *overrides: str, config: Path = CONFIG) -> float:
    """Seconds of a command."""
    start = time.perf_counter()
    program = [sys.executable, "-m", "stampede.engine.cli"]
    if name == "incremental":
        program = [sys.executable, "-m", "stampede.engine.incremental"]
    done = subprocess.run(
        [*program, config, *overrides], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return time.perf_counter() - start


def score(run: Path, file: Path) -> dict[str, float]:
    """AUC and logloss of a file, by scikit-learn."""
    scores = open_run(run).score(file)
    labels = np.array([int(line[:1]) for line in file.open("rb")])
    return {"auc": roc_auc_score(labels, scores), "logloss": log_loss(labels, scores)}


def picture(periods: list[dict[str, Any]]) -> bytes:
    """AUC over the periods, a line for each way."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for (way, label), style in zip(NAMES.items(), ("o-", "s--", "^:"), strict=True):
        axes.plot([p["period"] for p in periods], [p[way]["auc"] for p in periods], style,
                  label=label)  # fmt: skip
    axes.set(xlabel="period", ylabel="AUC before training on it")
    axes.grid(alpha=0.3)
    axes.legend()
    return to_png(figure)


def tables(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    seconds = found["seconds_of_second_half"]
    rows = [
        [
            label,
            f"{found['mean'][way]['auc']:.4f}",
            f"{found['mean'][way]['logloss']:.4f}",
            f"{seconds[way]:.0f}",
        ]
        for way, label in NAMES.items()
    ]
    heads = ["trained", "AUC", "logloss", "seconds, start-up included"]
    grown = "; ".join(
        f"{line['seconds']:.1f} for {line['new']:,} new ids in a table of {line['kept']:,} rows "
        f"that may grow, {line['evicting_seconds']:.1f} if it may not and they take the rows of "
        "others"
        for line in found["growth"]
    )
    parts = [
        "![AUC of the last six periods](../benchmarks/results/incremental.png)",
        markdown(heads, rows),
        wrapped(f"Seconds that it takes to give new ids their rows: {grown}."),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(CORES))
    main()
