"""Preparation by one process and by Spark's tasks, at two numbers of rows.

python benchmarks/on_spark.py

Each is a process of its own, from start to end. A log of Criteo's kind lies in eight files, or in
as many as `--files` says.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

from launched import run_program
from machine import OtherProcesses
from report import Report, command_line, markdown

_ENGINES = {"one process": [], "spark local[2]": ["--spark", "local[2]"]}


def on_spark(options: argparse.Namespace, report: Report) -> str:
    """Seconds of both at each number of rows, taking turns, and memory of the largest process."""
    found, peaks, others = {}, {}, OtherProcesses()
    before = others.seconds()
    for rows in [20_000] if options.quick else options.rows:
        with tempfile.TemporaryDirectory() as folder:
            logs = Path(folder) / "logs"
            sizes = ["--files", str(options.files), "--rows", str(rows // options.files)]
            run_program(["-m", "stampede", "synthetic", logs, *sizes])
            taken, most = {name: [] for name in _ENGINES}, dict.fromkeys(_ENGINES, 0)
            for _ in range(options.repeats):
                for name, given in _ENGINES.items():
                    print(f"{rows:,} rows, {name}", file=sys.stderr, flush=True)
                    out = Path(folder) / f"{len(taken[name])}-{len(given)}"
                    command = ["prepare", "criteo_kaggle", f"{logs}/*.tsv", "--out", out, *given]
                    done = run_program(["-m", "stampede", *command, "--set", "split=random"])
                    taken[name].append(done.seconds)
                    most[name] = max(most[name], done.peak_bytes)
                    shutil.rmtree(out)
        found[rows] = {name: median(each) for name, each in taken.items()}
        peaks[rows] = most
        share = round(others.share(before), 3)
        report.add(files=options.files, prepared=found, peak_bytes=peaks, other_processes=share)
    heads = ["rows", "prepared by", "seconds", "peak GB of a process"]
    table = [
        [f"{rows:,}", name, f"{seconds:.1f}", f"{peaks[rows][name] / 1e9:.2f}"]
        for rows, engines in found.items()
        for name, seconds in engines.items()
    ]
    return markdown(heads, table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rows", type=int, nargs="*", default=[2_000_000, 10_000_000])
    add("--files", type=int, default=8)
    add("--repeats", type=int, default=1)
    command_line(on_spark, parser=parser)
