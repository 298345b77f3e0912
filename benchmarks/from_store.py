"""Training and preparation from an object store at 20 ms and 100 MB/s, beside a disk.

python benchmarks/from_store.py

The store (file_store.py) takes processor time from the training on the same cores, which a store
elsewhere does not. It is measured, too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from clicks import IDS, write_clicks
from file_store import FileStore
from launched import launch, run_program
from report import ROOT, Report, command_line, markdown

from support.object_store import BUCKET, at_port

LATENCY, RATE = 0.02, 100e6
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
    with tempfile.TemporaryDirectory() as scratch:
        folder, served = Path(scratch), Path(scratch) / "served" / BUCKET.removeprefix("s3://")
        run_program(["-m", "stampede", "synthetic", folder / "log", "--files", "1", "--rows", rows])
        (log,) = (folder / "log").glob("*.tsv")
        shutil.copytree(clicks, served / "prepared")
        shutil.copy(log, served / "log.tsv")
        megabytes = sum(one.stat().st_size for one in clicks.rglob("*") if one.is_file()) / 1e6
        report.add(rows=rows, megabytes={"prepared": megabytes, "log": log.stat().st_size / 1e6})
        with _store(folder, served.parent):
            url, memory = f"{BUCKET}/prepared", megabytes / 1e3 / 4
            places = {
                "a disk": (clicks, log, f"data.memory_gb={memory}"),
                # The same batches; the first time, before anything was copied.
                "the store, row by row": (url, None, f"data.cache_gb={2 * memory}"),
                "the store, copied": (url, f"{BUCKET}/log.tsv", f"data.memory_gb={memory}"),
            }
            for name, place in places.items():
                print(name, file=sys.stderr, flush=True)
                report.add(**{name: measured(folder, *place)})
    found = {name: report.found[name] for name in places}
    measures = "fetching", "training", "in_steps", "by_the_store", "preparation"
    heads = ["from", "samples/s", *measures]
    table = [
        [name, f"{one['rate']:,.0f}", *(f"{one[n]:.1f} s" if n in one else "" for n in measures)]
        for name, one in found.items()
    ]
    return markdown(heads, table)


@contextmanager
def _store(folder: Path, served: Path) -> Iterator[None]:
    """Serve a folder from this process, to which local copies in another one belong."""
    with FileStore(served, LATENCY, RATE) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stores = {"STAMPEDE_STORES": str(folder / "stores")}
        try:
            with at_port(server.server_address[1]), patch.dict(os.environ, stores):
                yield
        finally:
            server.shutdown()


def measured(folder: Path, prepared: Path | str, log: Path | str | None, memory: str) -> dict:
    """Seconds of fetching prepared data, of training on them, and of preparing a log."""
    found = {}
    if log is not None:
        found["fetching"] = float(run_program(["-c", _FETCH, prepared]).said.split()[-1])
    job = [*_JOB, "data.kind=prepared", f"data.path={prepared}", memory]
    begun, by_the_store = time.perf_counter(), time.process_time()
    summary = launch(ROOT / "benchmarks/deepfm.yaml", "fp32", job, folder / "runs")
    found |= {
        "training": time.perf_counter() - begun,
        "in_steps": summary["train_seconds"],
        "by_the_store": time.process_time() - by_the_store,
        "rate": summary["samples_per_second"],
    }
    if log is not None:
        out = folder / "made"
        command = ["-m", "stampede", "prepare", "criteo_kaggle", log, "--out", out]
        found["preparation"] = run_program(command).seconds
        shutil.rmtree(out)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    command_line(from_store, parser=parser)
