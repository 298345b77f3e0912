"""Processes of their own: the launcher, and other programs that are measured."""

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

# Kept from returning memory to the system, glibc hands out big blocks that were used before
# instead of fresh ones, which the system fills with zeros (mallopt(3)).
KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_MAX_": "0",
}


def run_program(
    command: list[str | Path], threads: int = CORES, environment: dict[str, str] | None = None
) -> str:
    """What a Python program printed.

    Args:
        command: the program and its arguments.
        threads: of OpenMP.
        environment: more variables.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})},
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
    overrides: list[str],
    folder: Path,
    threads: int = CORES,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Train with launch.py; its run folder is deleted.

    Args:
        config: YAML file.
        overrides: of the configuration.
        folder: for the run folder; only one run at a time may use it.

    Returns:
        The summary, with `dense_layers`, the precision that the log names.
    """
    name = "benchmark"
    try:
        said = run_program(
            [
                ROOT / "launch.py",
                config,
                *overrides,
                f"run.dir={folder}",
                f"run.name={name}",
                "run.overwrite=true",
                "checkpoint.keep=1",
            ],
            threads,
            environment,
        )
        summary = json.loads((folder / name / "summary.json").read_text())
    finally:
        # At once: what was never written back to disk then costs no time.
        shutil.rmtree(folder / name, ignore_errors=True)
    precision = re.search(r"dense layers in (fp32|bf16)", said)
    return {**summary, "dense_layers": precision.group(1) if precision else "unknown"}
