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

    The calls are shared by as many threads as torch uses for its own operations, at most 4, this
    one among them. They do not spin when they wait, as those of OpenMP do: on a machine with other
    work this is no slower than it must be.
    """
    left = deque(arguments)

    def work() -> None:
        while left:
            try:
                argument = left.popleft()
            except IndexError:  # another thread was faster
                return
            function(argument)

    helpers = min(torch.get_num_threads(), _MOST_CORES, len(arguments)) - 1
    helping = [_helpers().submit(work) for _ in range(helpers)]
    work()
    for helper in helping:
        helper.result()


@lru_cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_CORES - 1, thread_name_prefix="stampede-gather")
