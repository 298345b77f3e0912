"""What single ranks ask for, known to all of them after the same step."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from stampede.engine.processes import Processes
from stampede.engine.stop_signals import StopSignals

# A step on a GPU takes milliseconds, and what is exchanged here does not pass through it.
_GPU_INTERVAL = 16


class Agreement:
    """Agrees at fixed intervals whether to stop, and whether a checkpoint is due by the clock.

    Any rank may ask to stop; the clock is rank 0's.

    Args:
        processes: all of which must ask at the same places.
        signals: of this process.
        minutes: between two checkpoints; 0: never by the clock.
    """

    def __init__(self, processes: Processes, signals: StopSignals, minutes: float) -> None:
        self._processes = processes
        self._signals = signals
        self._seconds = 60 * minutes
        self._interval = _GPU_INTERVAL if processes.device.type == "cuda" else 1
        self._saved = time.monotonic()

    def after(self, number: int) -> tuple[int, bool]:
        """What holds after step or batch `number`: a signal's number or 0, and if a save is due."""
        if number % self._interval:
            return 0, False
        due = bool(self._seconds) and time.monotonic() - self._saved >= self._seconds
        asked = torch.tensor([self._signals.received, due and self._processes.is_main])
        if self._processes.world_size > 1:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        signal, due = asked.tolist()
        return signal, bool(due)

    def saved(self) -> None:
        """A checkpoint was begun; the clock starts anew."""
        self._saved = time.monotonic()
