"""Compares training speed and peak memory of another checkout's launch.py with this one's.

The other checkout needs benchmarks/deepfm.yaml and its own `make setup`. Both take turns to train
the quickstart, and DeepFM on clicks from the checkout's own clicks.py, as end_to_end.py does.

    git worktree add ../old COMMIT && make -C ../old setup
    python benchmarks/old_and_new.py ../old
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from clicks import IDS
from machine import CORES, describe_machine
from report import ROOT, Report, parse_options
from tqdm import tqdm

ROWS = 1 << 19

WRITE_CLICKS = """
import sys
from pathlib import Path
sys.path.insert(0, "benchmarks")
from clicks import write_clicks
print(write_clicks(Path(sys.argv[1]), *map(int, sys.argv[2:])))
"""


@dataclass(frozen=True)
class Point:
    """A configuration and its overrides; `{clicks}` is the prepared folder."""

    name: str
    config: str
    overrides: tuple[str, ...]


def points(quick: bool) -> list[Point]:
    """DeepFM at three batch sizes in both precisions, and the quickstart."""
    bf16 = describe_machine()["bf16_instructions"]
    found = []
    for batch, epochs in ((1024, 1), (8192, 3), (65536, 3)):
        for precision in ("fp32", "bf16") if bf16 else ("fp32",):
            for rows in ("all", "touched") if batch == 1024 else ("all",):
                overrides = {
                    "data.path": "{clicks}",
                    "train.batch_size": batch,
                    "train.epochs": epochs,
                    "evaluate.every_epochs": epochs,
                    "optim.embedding.rows": rows,
                    "train.precision": precision,
                }
                words = tuple(f"{key}={value}" for key, value in overrides.items())
                name = f"{batch} {precision} {rows}"
                found.append(Point(name, "benchmarks/deepfm.yaml", words))
    found.append(Point("quickstart", "configs/quickstart.yaml", ("train.epochs=1",)))
    return found[:1] if quick else found


def measure(checkout: Path, point: Point, clicks: str, folder: Path) -> dict[str, float]:
    """Samples/s and peak resident set in GB of one run of a checkout's launch.py.

    Raises:
        RuntimeError: it failed.
    """
    overrides = [word.format(clicks=clicks) for word in point.overrides]
    place = [f"run.dir={folder}", "run.name=run", "run.overwrite=true"]
    command = [str(checkout / ".venv/bin/python"), "launch.py", point.config, *overrides, *place]
    environment = {**os.environ, "OMP_NUM_THREADS": str(CORES)}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=said, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{checkout}: {point.name} failed:\n{said.read()[-2000:]}")
    summary = json.loads((folder / "run/summary.json").read_text())
    # Delete at once, before the system spends time on writing it back.
    shutil.rmtree(folder / "run")
    return {
        "samples_per_second": summary["samples_per_second"],
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the other checkout")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs; default: 3")
    parser.add_argument("--only", nargs="+", help="names of points, such as `1024 fp32 all`")
    options = parse_options(parser, "old_and_new")
    old = options.old.resolve()
    rows, ids = (16_384, 200_000) if options.quick else (ROWS, IDS)
    wanted = [one for one in points(options.quick) if one.name in (options.only or [one.name])]
    report = Report(options.out, options.quick)
    git = ["git", "-C", str(old), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    report.add(old=commit, rows=rows, ids=ids)
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        clicks = {}
        for checkout in (old, ROOT):
            folder = Path(scratch) / f"clicks-{len(clicks)}"
            arguments = [str(folder), str(rows), str(ids)]
            python = str(checkout / ".venv/bin/python")
            written = subprocess.check_output(
                [python, "-c", WRITE_CLICKS, *arguments], cwd=checkout, text=True
            )
            clicks[checkout] = written.splitlines()[-1]
        for point in tqdm(wanted, desc="old and new", unit="point", ncols=100):
            runs: dict[Path, list[dict[str, float]]] = {old: [], ROOT: []}
            for turn in range(options.repeats):
                for checkout in (old, ROOT) if turn % 2 == 0 else (ROOT, old):
                    run = measure(checkout, point, clicks[checkout], Path(scratch))
                    runs[checkout].append(run)
            found[point.name] = compare(runs[old], runs[ROOT])
            report.add(points=found)
            ratio = found[point.name]
            tqdm.write(
                f"{point.name:>20}: speed {ratio['speed_ratio']:.3f}, "
                f"peak memory {ratio['memory_ratio']:.3f} of before"
            )
    report.close()


def compare(old: list[dict[str, float]], new: list[dict[str, float]]) -> dict:
    """Ratios of new to old, each the median over the pairs of runs."""
    return {
        "speed_ratio": _ratio(old, new, "samples_per_second"),
        "memory_ratio": _ratio(old, new, "peak_gb"),
        "old": old,
        "new": new,
    }


def _ratio(old: list[dict[str, float]], new: list[dict[str, float]], key: str) -> float:
    pairs = zip(old, new, strict=True)
    return round(statistics.median(after[key] / before[key] for before, after in pairs), 4)


if __name__ == "__main__":
    sys.exit(main())
