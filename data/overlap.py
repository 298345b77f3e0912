"""Work done in threads ahead of its use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def computed_ahead(
    function: Callable[[T], R], arguments: Iterable[T], count: int, threads: int = 1
) -> Iterator[R]:
    """`map(function, arguments)`, with up to `count` results computed before they are asked for.

    Results come in order; one thread also calls the function in order. Its exceptions are raised,
    as they are, where the result is asked for. The threads end with the iterator: at its end, when
    it is closed, or when it is forgotten, as after a break.

    Args:
        count: 0 computes each result when it is asked for, without a thread.
        threads: that call the function.
    """
    if count == 0:
        yield from map(function, arguments)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="stampede-ahead")
    pending: deque[Future[R]] = deque()
    try:
        for argument in arguments:
            pending.append(pool.submit(function, argument))
            if len(pending) > count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def while_made(items: Iterable[T], work: Callable[[T], object]) -> None:
    """Call `work` with each item, in order, in a thread, while the next items are made."""
    for _ in computed_ahead(work, items, 1):
        pass
