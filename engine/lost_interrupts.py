"""SIGINT that Python would lose."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Until the finalizer is left that the exception was raised in.
_SECONDS = 0.05


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Within it a `KeyboardInterrupt` raised in a finalizer is raised again, outside of it.

    Python prints what is raised in `__del__` or by `weakref.finalize`, and goes on: who presses
    Ctrl-C while garbage is collected would not be heard.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Not from here, where it would be lost as well.
            again = threading.Timer(_SECONDS, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
