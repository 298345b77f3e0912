"""All benchmarks of training speed, one after the other: `make bench`.

Each has its own process, prints its tables and writes its results after each part. A
benchmark that fails or takes too long does not stop the others; the exit status is then 1.

    python benchmarks --quick
    python benchmarks --only end_to_end update_kernel
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from machine import CORES
from report import RESULTS, ROOT

# In this order, each with its time limit in minutes.
BENCHMARKS = {
    "update_kernel": 6,
    "waiting_rows": 10,
    "step_breakdown": 8,
    "end_to_end": 30,
    "growth": 15,
    "communication": 8,
    "bf16_auc": 15,
}

# Seconds for an interrupted benchmark to remove its temporary files.
_GRACE = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a minute; the figures mean little")
    names = list(BENCHMARKS)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the results; default: benchmarks/results, with --quick "
        "cache/benchmarks/quick",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "cache/benchmarks",
        help="folder for drawn clicks, which are kept, and unfinished runs",
    )
    options = parser.parse_args()
    out = options.out or (options.folder / "quick" if options.quick else RESULTS)
    failed, start = [], time.perf_counter()
    for name in options.only:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, ROOT / "benchmarks" / f"{name}.py"]
        command += ["--out", out / f"{name}.json", "--folder", options.folder]
        command += ["--quick"] if options.quick else []
        failure = _run(list(map(str, command)), 60.0 * BENCHMARKS[name])
        if failure:
            failed.append(name)
            print(f"{name} {failure}", file=sys.stderr, flush=True)
    print(f"\n{(time.perf_counter() - start) / 60:.1f} minutes; results in {out}")
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed")


def _run(command: list[str], seconds: float) -> str:
    """Run a benchmark; return what went wrong, or an empty string."""
    # In its own process group, so that its children end with it.
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": str(CORES)}, start_new_session=True
    )
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"was stopped after {seconds / 60:.0f} minutes"
    finally:
        # Also if this process is interrupted.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return f"failed with exit status {status}" if status else ""


if __name__ == "__main__":
    main()
