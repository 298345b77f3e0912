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
from contextlib import suppress
from pathlib import Path

from machine import CORES
from report import CACHE, RESULTS, ROOT

# In this order, each with its time limit in minutes, and its script if that has another name.
BENCHMARKS = {
    "update_kernel": (6, ""),
    "step_breakdown": (8, "steps"),
    "end_to_end": (30, ""),
    "growth": (15, "steps"),
    "communication": (8, ""),
}

# Seconds for an interrupted benchmark to remove its temporary files.
_GRACE = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a minute; the figures mean little")
    names = list(BENCHMARKS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help=", ".join(names))
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--folder", type=Path, default=CACHE, help="for drawn clicks and runs")
    options = parser.parse_args()
    out = options.out or (options.folder / "quick" if options.quick else RESULTS)
    failed = []
    for name in options.only:
        print(f"\n== {name}", flush=True)
        minutes, script = BENCHMARKS[name]
        command = [sys.executable, f"{ROOT}/benchmarks/{script or name}.py"]
        command += [name] if script else []
        command += ["--out", f"{out}/{name}.json", "--folder", str(options.folder)]
        if failure := run(command + ["--quick"] * options.quick, 60.0 * minutes):
            failed.append(f"{name} {failure}")
    print(f"\nresults in {out}")
    if failed:
        sys.exit(f"error: {', '.join(failed)}")


def run(command: list[str], seconds: float) -> str:
    """Run a benchmark; return what went wrong, or an empty string."""
    # In its own process group, so that its children end with it.
    environment = {**os.environ, "OMP_NUM_THREADS": str(CORES)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status = process.wait(seconds)
        return f"failed with exit status {status}" if status else ""
    except subprocess.TimeoutExpired:
        return f"was stopped after {seconds / 60:.0f} minutes"
    finally:
        # Also if this process is interrupted.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    main()
