"""Work on items while the next are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def one_behind(items: Iterable[T], work: Callable[[T], object]) -> None:
    """Call `work` with each item, in order, in a thread, while the next item is made.

    At most two items exist at a time. The first error of either side ends both.
    """
    with ThreadPoolExecutor(1) as thread:
        running: Future[object] | None = None
        for item in items:
            if running is not None:
                running.result()
            running = thread.submit(work, item)
        if running is not None:
            running.result()
