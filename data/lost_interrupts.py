"""SIGINT that Python would lose."""

from __future__ import annotations

import _thread
import sys
import time
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
    pending: list[None] = []

    def interrupt_soon() -> None:
        time.sleep(_SECONDS)
        _thread.interrupt_main()
        pending.pop()

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Not from here, where it would be lost as well; and without the locks of `threading`,
            # which the code around the finalizer may hold.
            pending.append(None)
            _thread.start_new_thread(interrupt_soon, ())
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
        while pending:
            time.sleep(_SECONDS)
    finally:
        sys.unraisablehook = before
