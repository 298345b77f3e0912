"""Requests to stop: SIGTERM and SIGINT."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# torchrun hands a signal on, sooner or later, that a terminal has sent to its workers already: that
# is one request.
_ONE_REQUEST_SECONDS = 5.0


class StopSignals:
    """The first signal that asked this process to stop.

    Attributes:
        received: its number; 0 before.
    """

    def __init__(self) -> None:
        self.received = 0
        self._since = 0.0

    @contextmanager
    def watched(self) -> Iterator[StopSignals]:
        """Within it the first signal is only noted; a second one, five seconds later, exits.

        The exit status is then 128 and the signal's number. Outside of the main thread, which
        alone may handle signals, nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
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
