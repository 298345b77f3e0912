"""Training and preparation from an object store at 20 ms and 100 MB/s, beside a disk.

python benchmarks/from_store.py

The store is moto's S3 server on this machine behind a proxy. It takes processor time, too: where
there are few cores, a store elsewhere takes less.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from clicks import IDS, write_clicks
from launched import launch, run_program
from report import ROOT, Report, command_line, markdown

from support.object_store import BUCKET, between, object_store

LATENCY, RATE = 0.02, 100e6
_COMMAND = "import sys; from stampede.engine.cli import stampede; sys.exit(stampede())"
_FETCH = """
import sys, time
from stampede import stores
import fsspec, s3fs
begun = time.perf_counter()
stores.fetched(sys.argv[1])
print(time.perf_counter() - begun)
"""
_JOB = [
    "evaluate.select_on=test", "evaluate.compare_with_lr=false", "train.epochs=1",
    "train.batch_size=8192",
]  # fmt: skip


def from_store(options: argparse.Namespace, report: Report) -> str:
    """Seconds and rates of each."""
    rows, ids = (20_000, 10_000) if options.quick else (options.rows, IDS)
    clicks = write_clicks(options.folder, rows, ids)
    with tempfile.TemporaryDirectory() as scratch, object_store(Path(scratch) / "stores") as files:
        folder = Path(scratch)
        run_program(["-c", _COMMAND, "synthetic", folder / "log", "--files", "1", "--rows", rows])
        (log,) = (folder / "log").glob("*.tsv")
        files.put(str(clicks), f"{BUCKET}/prepared", recursive=True)
        files.put_file(str(log), f"{BUCKET}/log.tsv")
        megabytes = sum(one.stat().st_size for one in clicks.rglob("*") if one.is_file()) / 1e6
        report.add(rows=rows, megabytes={"prepared": megabytes, "log": log.stat().st_size / 1e6})
        with between(seconds=LATENCY, bytes_per_second=RATE):
            places = {
                "a disk": (clicks, log),
                "the store": (f"{BUCKET}/prepared", f"{BUCKET}/log.tsv"),
            }
            for name, (prepared, text) in places.items():
                print(name, file=sys.stderr, flush=True)
                report.add(**{name: measured(folder, prepared, text)})
    found = {name: report.found[name] for name in places}
    heads = ["from", "fetching", "training", "of that in steps", "samples/s", "preparation"]
    table = [
        [name, *(f"{one[what]:.1f} s" for what in ("fetching", "training", "in_steps")),
         f"{one['rate']:,.0f}", f"{one['preparation']:.1f} s"]
        for name, one in found.items()
    ]  # fmt: skip
    return markdown(heads, table)


def measured(folder: Path, prepared: Path | str, log: Path | str) -> dict:
    """Seconds of fetching prepared data, of training on them, and of preparing a log."""
    fetched = run_program(["-c", _FETCH, prepared]).said.split()[-1]
    job = [*_JOB, "data.kind=prepared", f"data.path={prepared}"]
    begun = time.perf_counter()
    summary = launch(ROOT / "benchmarks/deepfm.yaml", "fp32", job, folder / "runs")
    seconds, out = time.perf_counter() - begun, folder / "made"
    command = ["-c", _COMMAND, "prepare", "criteo_kaggle", log, "--out", out]
    preparation = run_program(command).seconds
    shutil.rmtree(out)
    return {
        "fetching": float(fetched),
        "training": seconds,
        "in_steps": summary["train_seconds"],
        "rate": summary["samples_per_second"],
        "preparation": preparation,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    command_line(from_store, parser=parser)
