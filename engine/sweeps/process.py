"""The process of a trial."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Runs a trial with these arguments, its output in that file; its exit status.
Start = Callable[[Sequence[str], Path], int]


def start_on(processes: int) -> Start:
    """What trains on that many processes of this machine; more than one with torchrun."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={processes}"]
    command += ["-m", "stampede.engine.sweeps.trial"]

    def start(arguments: Sequence[str], log: Path) -> int:
        with log.open("ab") as said:
            trial = subprocess.Popen(
                [*command, *arguments], stdin=subprocess.PIPE, stdout=said, stderr=said
            )
            try:
                return _ended(trial)
            finally:
                # After an interrupt: the trial ends when its input does.
                trial.stdin.close()
                trial.wait()

    return start


def _ended(trial: subprocess.Popen) -> int:
    # Polars lets system calls go on after an interrupt: one that lasts would never see it.
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return trial.wait(1.0)
