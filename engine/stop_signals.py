"""Requests to stop: SIGTERM and SIGINT."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stampede.engine.processes import launched_rank
from stampede.engine.watchdog.last_words import within

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# torchrun hands a signal on, sooner or later, that a terminal has sent to its workers already: that
# is one request.
_ONE_REQUEST_SECONDS = 5.0

# No signal has this number.
_END = 0


class StopSignals:
    """The first signal that asked this process to stop.

    Attributes:
        received: its number; 0 before.
    """

    def __init__(self) -> None:
        self.received = 0

    @contextmanager
    def watched(self) -> Iterator[StopSignals]:
        """Within it the first signal is only noted; a second one, five seconds later, ends at once.

        The exit status is then 128 and the signal's number, whatever the main thread is doing.
        Outside of the main thread, which alone may handle signals, nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            with _second_signals():
                yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received = number


@contextmanager
def _second_signals() -> Iterator[None]:
    """End this process on a second signal.

    Python calls a handler only once the main thread is back from C++, from a collective for
    example; where signals are written to is told at once.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    thread = threading.Thread(
        target=_end_on_second, args=(reads,), name="stampede-signals", daemon=True
    )
    thread.start()
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        # Not by closing it, as a process that was forked may have it open as well.
        os.write(writes, bytes([_END]))
        thread.join()
        os.close(writes)
        os.close(reads)


def _end_on_second(reads: int) -> None:
    """Read the numbers of signals until `_END`."""
    since: float | None = None
    while (number := os.read(reads, 1)[0]) != _END:
        if number not in _SIGNALS:
            continue
        now = time.monotonic()
        since = since or now
        if now - since > _ONE_REQUEST_SECONDS:
            within(1.0, lambda number=number: _say_so(number))
            within(1.0, sys.stdout.flush)
            os._exit(128 + number)


def _say_so(number: int) -> None:
    if launched_rank() == 0:
        name = signal.Signals(number).name
        text = f"\nstopped at once by {name}; checkpoint.resume=auto continues from the newest "
        # Not through `sys.stderr`, whose lock the main thread may hold.
        os.write(2, f"{text}checkpoint\n".encode())
