"""Starts the launcher and other measured programs, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from machine import CORES
from report import ROOT

# The launcher's settings in `stampede.engine.start_up`, for other programs (mallopt(3)).
KEEP_MEMORY = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_MAX_": "0",
}

# Variables to remove, so that programs start with glibc's defaults.
_ALLOCATORS = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE")

# The launcher times bf16 against fp32, which may go wrong on a busy machine.
_ATTEMPTS = 3

# Until exec, a process counts its parent's memory as its own, so a small process starts programs.
_STARTER = """
import contextlib, ctypes, json, os, resource, subprocess, sys, time
# Spark's JVM outlives the program that starts it; its time counts, too (PR_SET_CHILD_SUBREAPER).
ctypes.CDLL(None).prctl(36, 1)
start = time.perf_counter()
status = subprocess.run(sys.argv[1:]).returncode
with contextlib.suppress(ChildProcessError):
    while True:
        os.wait()
seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
print("\\n" + json.dumps([seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
sys.exit(status)
"""


class Done(NamedTuple):
    """What a program printed, and what it took from its start to its end."""

    said: str
    seconds: float
    processor_seconds: float
    peak_bytes: int


def run_program(
    command: list[str | Path],
    threads: int = CORES,
    environment: dict[str, str] | None = None,
    python: str | Path = sys.executable,
) -> Done:
    """Run a Python program, without the shell's allocator settings.

    Raises:
        RuntimeError: it failed.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_ALLOCATORS)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", _STARTER, python, *map(str, command)],
        env={**inherited, "OMP_NUM_THREADS": str(threads), **(environment or {})},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    said, _, taken = done.stdout.rstrip().rpartition("\n")
    if done.returncode:
        what = (done.stderr or said).strip()[-2000:]
        raise RuntimeError(f"{' '.join(map(str, command[:2]))} failed:\n{what}")
    return Done(said, *json.loads(taken))


def launch(config: Path, precision: str, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Train with launch.py in a run folder within `folder`, and return the summary.

    Raises:
        RuntimeError: training failed, or used another precision.
    """
    run = folder / "benchmark"
    overrides = [*overrides, f"run.dir={folder}", f"run.name={run.name}", "run.overwrite=true"]
    overrides += ["checkpoint.keep=1", f"train.precision={precision}"]
    for _ in range(_ATTEMPTS):
        try:
            said = run_program([ROOT / "launch.py", config, *overrides]).said
            summary = json.loads((run / "summary.json").read_text())
        finally:
            # Delete at once, before the system spends time on writing it back.
            shutil.rmtree(run, ignore_errors=True)
        computed = re.search(r"dense layers in (.*)", said).group(1)
        if computed.startswith(precision):
            return summary
    raise RuntimeError(f"train.precision={precision}: the launcher used {computed}")
