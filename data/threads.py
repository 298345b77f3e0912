"""Work done in threads: ahead of its use, or on several cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

# More wait for each other, and for the memory.
_MOST_CORES = 4


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


def run_tasks(function: Callable[[T], None], arguments: Sequence[T]) -> None:
    """Call a function that leaves the interpreter to others, as numpy's do, for each argument.

    As many threads share the calls as torch uses for its own operations, at most 4. They do not
    spin when they wait, as those of OpenMP do, so that a machine with other work is no slower than
    it must be.
    """
    cores = min(torch.get_num_threads(), _MOST_CORES, len(arguments))
    calls = _pool(cores).map(function, arguments) if cores > 1 else map(function, arguments)
    for _ in calls:
        pass


@lru_cache
def _pool(cores: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores, thread_name_prefix="stampede-gather")
