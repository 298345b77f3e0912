"""Work done ahead of its use, in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def computed_ahead(function: Callable[[T], R], arguments: Iterable[T], count: int) -> Iterator[R]:
    """`map(function, arguments)`, with up to `count` results computed before they are asked for.

    One thread calls the function, in order. Its exceptions are raised, as they are, where the
    result is asked for. The thread ends with the iterator: at its end, when it is closed, or when
    it is forgotten, as after a break.

    Args:
        count: 0 computes each result when it is asked for, without a thread.
    """
    if count == 0:
        yield from map(function, arguments)
        return
    pool = ThreadPoolExecutor(1, thread_name_prefix="stampede-read")
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
