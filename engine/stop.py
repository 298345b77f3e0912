"""Stop on a signal and save by the clock, as all ranks agree."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from stampede.engine.processes import Processes

# A Ctrl-C reaches the workers from the terminal and again through torchrun: one request.
_ONE_REQUEST_SECONDS = 5.0

# A step on a GPU takes milliseconds; this exchange takes place on the CPU.
_GPU_INTERVAL = 16


class StopSignals:
    """The first SIGTERM or SIGINT that asked to stop; `received` is its number, or 0."""

    def __init__(self) -> None:
        self.received = 0
        self._since = 0.0

    @contextmanager
    def watched(self) -> Iterator[StopSignals]:
        """Note the first signal; a second one, five seconds later, exits with 128 plus its number.

        Only the main thread can handle signals; in others nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > _ONE_REQUEST_SECONDS:
            sys.exit(128 + number)


class Agreement:
    """Agreement of all ranks, at the same points, on whether to stop and whether to save.

    Any rank may ask to stop; rank 0's clock decides on saves, every so many `minutes` (0: none).
    """

    def __init__(self, processes: Processes, signals: StopSignals, minutes: float) -> None:
        self._processes = processes
        self._signals = signals
        self._seconds = 60 * minutes
        self._interval = _GPU_INTERVAL if processes.device.type == "cuda" else 1
        self._saved = time.monotonic()

    def after(self, number: int) -> tuple[int, bool]:
        """After step or batch `number`: the signal or 0, and whether a save is due."""
        if number % self._interval:
            return 0, False
        due = bool(self._seconds) and time.monotonic() - self._saved >= self._seconds
        asked = torch.tensor([self._signals.received, due and self._processes.is_main])
        if self._processes.world_size > 1:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        number, due = asked.tolist()
        return number, bool(due)

    def saved(self) -> None:
        """Restart the clock after a save."""
        self._saved = time.monotonic()
