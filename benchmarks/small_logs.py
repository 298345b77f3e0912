"""Small logs with the recipe's own settings, on a quiet and on a busy machine.

Synthetic clicks in Criteo's layout, prepared once. launch.py trains as a user would, and everything
but its training counts as "around": imports, evaluation, pictures, logistic regression. Plain
PyTorch (peers/plain_pytorch.py) trains the same network with SparseAdam on the same batches. "Busy"
is beside as many endless loops as there are cores, "two" is two trainings at once. Contenders take
turns; results are medians. With `--python`, LightGBM and FuxiCTR's DeepFM (peers/raw_logs.py, see
quality.py) give the time from the raw log to tuned scores, as context.

    python benchmarks/small_logs.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from launched import run_program
from machine import CORES
from report import ROOT, Report, command_line, markdown
from tqdm import tqdm

CONFIG = ROOT / "configs/table.yaml"
PLAIN = ROOT / "benchmarks/peers/plain_pytorch.py"
PEERS = {"lightgbm": "LightGBM", "fuxictr": "FuxiCTR DeepFM"}

ROWS, QUICK_ROWS = (10_000, 100_000, 1_000_000), (3_000,)
REPEATS = 3

# Steps of plain PyTorch: enough for its rate.
PLAIN_STEPS = 300


def small_logs(options: argparse.Namespace, report: Report) -> str:
    """Rates by rows, contender and load, and the seconds around training."""
    sizes = QUICK_ROWS if options.quick else options.rows
    repeats = 1 if options.quick else REPEATS
    found: dict[str, Any] = {}
    with tqdm(total=len(sizes) * repeats * 5, desc="small logs", unit="run", ncols=100) as bar:
        for rows in sizes:
            found[str(rows)] = measured(options, rows, repeats, bar)
            report.add(logs=found)
    return tables(report.found)


def measured(options: argparse.Namespace, rows: int, repeats: int, bar: tqdm) -> dict[str, Any]:
    """What was measured on a log of so many rows."""
    log = written(options.folder, rows)
    prepared = options.folder / f"small-{rows}"
    if not prepared.exists():
        command = ["-m", "stampede", "prepare", "criteo_kaggle", log, "--out", prepared]
        run_program(command)
    scratch = options.folder / "small-runs"
    each: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        summary, seconds = trained(prepared, scratch / "one")
        each["quiet"].append(summary["samples_per_second"])
        each["around_seconds"].append(seconds - summary["train_seconds"])
        bar.update()
        each["plain quiet"].append(plain(prepared, summary))
        bar.update()
        with busy():
            each["busy"].append(trained(prepared, scratch / "one")[0]["samples_per_second"])
            bar.update()
            each["plain busy"].append(plain(prepared, summary))
            bar.update()
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda n: trained(prepared, scratch / n)[0], ["one", "two"]))
        each["two"].append(sum(one["samples_per_second"] for one in both))
        bar.update()
    return {
        **{name: statistics.median(values) for name, values in each.items()},
        "batch_size": summary["batch_size"],
        "epochs": summary["epochs"],
        "train_seconds": summary["train_seconds"],
        "peers": {peer: seconds_of(peer, log, rows, options) for peer in PEERS if options.python},
    }


def written(folder: Path, rows: int) -> Path:
    """The raw log, written once."""
    target = folder / f"small-log-{rows}"
    options = ["--files", "1", "--rows", rows, "--scale", "0.01"]
    run_program(["-m", "stampede", "synthetic", target, *options])
    return target / "day_1.tsv"


def trained(prepared: Path, folder: Path) -> tuple[dict[str, Any], float]:
    """The summary of a run of the launcher, and the seconds of its process."""
    overrides = ["data.kind=prepared", f"data.path={prepared}"]
    overrides += [f"run.dir={folder}", "run.name=run", "run.overwrite=true"]
    try:
        done = run_program([ROOT / "launch.py", CONFIG, *overrides])
        return json.loads((folder / "run/summary.json").read_text()), done.seconds
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def plain(prepared: Path, summary: dict[str, Any]) -> float:
    """Samples/s of plain PyTorch with the run's batch size and dropout."""
    options = ["--batch", summary["batch_size"], "--steps", PLAIN_STEPS, "--epochs", 1000]
    options += ["--dropout", "0.2" if summary["rows"]["train"] < 1_000_000 else "0"]
    command = [PLAIN, prepared, "--optimizer", "sparse_adam", "--threads", CORES, *options]
    done = json.loads(run_program(command).said.splitlines()[-1])
    return done["samples"] / done["seconds"]


def seconds_of(peer: str, log: Path, rows: int, options: argparse.Namespace) -> float:
    """Seconds of another project's model from the raw log to its scores."""
    parts, scratch = log.with_suffix(".npy"), options.folder / "small-peer"
    place = np.arange(rows) / rows
    np.save(parts, np.where(place < 0.8, 0, np.where(place < 0.9, 1, 2)).astype(np.int8))
    program = ROOT / "benchmarks/peers/raw_logs.py"
    command = [program, peer, "criteo", log, "--parts", parts, "--scratch", scratch]
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    return run_program(command, python=options.python).seconds


@contextmanager
def busy() -> Iterator[None]:
    """As many endless loops as there are cores."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(CORES)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def tables(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    heads = ["rows", "batch", "samples/s", "plain PyTorch", "ratio", "busy", "plain, busy",
             "busy / quiet", "two / one", "training, s", "around it, s"]  # fmt: skip
    heads += [f"{name}, s" for name in PEERS.values()]
    lines = []
    for rows, one in found["logs"].items():
        peers = [f"{one['peers'][peer]:.0f}" if one["peers"] else "" for peer in PEERS]
        lines.append([
            f"{int(rows):,}", f"{one['batch_size']:,}", f"{one['quiet']:,.0f}",
            f"{one['plain quiet']:,.0f}", f"{one['quiet'] / one['plain quiet']:.2f}",
            f"{one['busy']:,.0f}", f"{one['plain busy']:,.0f}",
            f"{one['busy'] / one['quiet']:.2f}", f"{one['two'] / one['quiet']:.2f}",
            f"{one['train_seconds']:.1f}", f"{one['around_seconds']:.1f}", *peers,
        ])  # fmt: skip
    return markdown(heads, lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of the logs")
    parser.add_argument("--python", type=Path, help="with lightgbm and fuxictr, see quality.py")
    command_line(small_logs, parser=parser)
