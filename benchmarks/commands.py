"""Seconds of short commands, beside those of importing torch and torchrec: what a user waits for.

Commands on a small log and imports take turns; results are medians.

    python benchmarks/commands.py
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from itertools import islice

from launched import run_program
from report import Report, command_line, markdown

ROWS = 20_000
# Its status is that of a mistake, which the benchmark takes for a failure.
_WRONG = """
from stampede.engine.cli import stampede
assert stampede(["train", "configs/criteo_kaggle.yaml", "data.path=absent.txt"]) == 2
"""
REPEATS = 5


def commands(options: argparse.Namespace, report: Report) -> str:
    """Seconds by command."""
    logs = options.folder / "commands-log"
    run_program(["-m", "stampede", "synthetic", logs, "--files", "1", "--rows", ROWS])
    log, few = logs / "day_1.tsv", logs / "ten.tsv"
    with log.open() as lines:
        few.write_text("".join(islice(lines, 10)))
    job = ["configs/criteo_kaggle.yaml", f"run.dir={options.folder}", "run.name=commands"]
    job += [f"data.cache={logs}", "data.test_fraction=0.1", "data.split=random"]
    job += ["train.epochs=1", "run.overwrite=true"]
    run_program(["-m", "stampede", "train", *job, f"data.path={log}"])
    run, scores = options.folder / "commands", options.folder / "commands.parquet"
    timed = {
        "import torch": ["-c", "import torch"],
        "import torch, torchrec": ["-c", "import torch, torchrec"],
        "predict --help": ["-m", "stampede", "predict", "--help"],
        "train, a wrong path": ["-c", _WRONG],
        "predict, 10 rows": ["-m", "stampede", "predict", run, few, scores, "--overwrite"],
    }
    seconds = defaultdict(list)
    for _ in range(1 if options.quick else REPEATS):
        for name, command in timed.items():
            seconds[name].append(run_program(command).seconds)
    found = {name: statistics.median(each) for name, each in seconds.items()}
    report.add(seconds=found)
    return markdown(["", "seconds"], [[name, f"{one:.1f}"] for name, one in found.items()])


if __name__ == "__main__":
    command_line(commands)
