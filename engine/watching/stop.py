"""Stops all ranks on a signal to any of them."""

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


class StopRequestedError(Exception):
    """All ranks have agreed to stop because of a signal, of this number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


class Agreement:
    """Agreement of all ranks, at the same points, on whether to stop and on rank 0's wish.

    A signal to any rank asks to stop.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._interval = _GPU_INTERVAL if processes.device.type == "cuda" else 1
        # The first signal and its time.
        self._received, self._since = 0, 0.0

    @contextmanager
    def noting_signals(self) -> Iterator[None]:
        """Note SIGTERM or SIGINT; another one, five seconds later, exits with 128 plus its number.

        Only the main thread can handle signals; in others nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._received:
            self._received, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > _ONE_REQUEST_SECONDS:
            sys.exit(128 + number)

    def after(self, number: int, wish: bool = False) -> bool:
        """Rank 0's wish after step or batch `number`; on a GPU only every few steps.

        Raises:
            StopRequestedError: on all ranks, if any was asked to stop.
        """
        if number % self._interval:
            return False
        received = self._received
        if self._processes.world_size > 1:
            asked = torch.tensor([received, wish and self._processes.is_main])
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
            received, wish = asked.tolist()
        if received:
            raise StopRequestedError(received)
        return bool(wish)
