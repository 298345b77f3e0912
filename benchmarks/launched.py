"""Starts the launcher and other measured programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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
ATTEMPTS = 3


def run_program(
    command: list[str | Path],
    threads: int = CORES,
    environment: dict[str, str] | None = None,
    python: str = sys.executable,
) -> str:
    """Run a Python program and return its output.

    The shell's allocator settings are removed.

    Args:
        command: the program and its arguments.
        threads: of OpenMP.
        environment: more variables.
        python: the interpreter.

    Raises:
        RuntimeError: it failed.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_ALLOCATORS)}
    done = subprocess.run(
        [python, *map(str, command)],
        env={**inherited, "OMP_NUM_THREADS": str(threads), **(environment or {})},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise RuntimeError(f"{' '.join(map(str, command[:2]))} failed:\n{said}")
    return done.stdout


def launch(
    config: Path,
    precision: str,
    overrides: list[str],
    folder: Path,
    threads: int = CORES,
) -> dict[str, Any]:
    """Train with launch.py; its run folder is deleted.

    Args:
        config: YAML file.
        precision: of the dense layers.
        overrides: of the configuration.
        folder: for the run folder; for one run at a time.

    Returns:
        The summary.

    Raises:
        RuntimeError: training failed, or used another precision.
    """
    run = folder / "benchmark"
    overrides = [*overrides, f"run.dir={folder}", f"run.name={run.name}", "run.overwrite=true"]
    overrides += ["checkpoint.keep=1", f"train.precision={precision}"]
    for _ in range(ATTEMPTS):
        try:
            said = run_program([ROOT / "launch.py", config, *overrides], threads)
            summary = json.loads((run / "summary.json").read_text())
        finally:
            # Delete at once, before the system spends time on writing it back.
            shutil.rmtree(run, ignore_errors=True)
        computed = re.search(r"dense layers in (.*)", said).group(1)
        if computed.startswith(precision):
            return summary
    raise RuntimeError(f"train.precision={precision}: the launcher used {computed}")
