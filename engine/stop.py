"""Asking a run to stop, or to save by the clock: signals, and what all ranks agree on."""

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

# torchrun forwards a signal that its workers may have got from the terminal already: that is one
# request.
_ONE_REQUEST_SECONDS = 5.0

# A step on a GPU takes milliseconds, and this exchange does not pass through it.
_GPU_INTERVAL = 16


class StopSignals:
    """The first SIGTERM or SIGINT that asked this process to stop.

    Attributes:
        received: its number; 0 before.
    """

    def __init__(self) -> None:
        self.received = 0
        self._since = 0.0

    @contextmanager
    def watched(self) -> Iterator[StopSignals]:
        """Within it the first signal is only noted; a second one, five seconds later, exits.

        The exit status is then 128 plus the signal's number. Threads other than the main one may
        not handle signals; there nothing changes.
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
    """Lets all ranks agree, at fixed intervals, whether to stop and whether a save is due.

    Any rank may ask to stop; the clock is rank 0's.

    Args:
        processes: all of which must ask at the same places.
        signals: of this process.
        minutes: between two checkpoints; 0: none by the clock.
    """

    def __init__(self, processes: Processes, signals: StopSignals, minutes: float) -> None:
        self._processes = processes
        self._signals = signals
        self._seconds = 60 * minutes
        self._interval = _GPU_INTERVAL if processes.device.type == "cuda" else 1
        self._saved = time.monotonic()

    def after(self, number: int) -> tuple[int, bool]:
        """After step or batch `number`: the number of a signal or 0, and whether a save is due."""
        if number % self._interval:
            return 0, False
        due = bool(self._seconds) and time.monotonic() - self._saved >= self._seconds
        asked = torch.tensor([self._signals.received, due and self._processes.is_main])
        if self._processes.world_size > 1:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        number, due = asked.tolist()
        return number, bool(due)

    def saved(self) -> None:
        """A checkpoint was begun: the clock starts anew."""
        self._saved = time.monotonic()
