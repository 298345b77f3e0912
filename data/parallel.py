"""Threads that work ahead of their consumer, or share one task."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

# More threads would wait for memory.
_MOST_CORES = 4


def computed_ahead(
    function: Callable[[T], R], arguments: Iterable[T], count: int, threads: int = 1
) -> Iterator[R]:
    """`map(function, arguments)` with up to `count` results computed ahead, in threads.

    Results come in order; a single thread also makes its calls in order. An exception is raised in
    place of its result. The threads end with the iterator: when it is exhausted, closed or
    garbage-collected. With a `count` of 0 there are no threads.
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


def run_tasks(function: Callable[[T], None], arguments: Sequence[T]) -> None:
    """Call a function that releases the GIL, as numpy's do, for each argument.

    This thread and its helpers share the calls: as many threads as torch uses, at most 4. Unlike
    OpenMP's threads they do not spin while they wait. After a failure no new call starts.
    """
    import torch  # here: preparing data must not import torch

    left = deque(arguments)

    def work() -> None:
        while left:
            try:
                argument = left.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                function(argument)
            except BaseException:
                left.clear()
                raise

    helpers = min(torch.get_num_threads(), _MOST_CORES, len(arguments)) - 1
    helping = [_helpers().submit(work) for _ in range(helpers)]
    try:
        work()
    finally:
        # Cancel helpers that have not started: the work is done.
        begun = [helper for helper in helping if not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()


@lru_cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_CORES - 1, thread_name_prefix="stampede-gather")


# A forked process inherits the pool without its threads.
os.register_at_fork(after_in_child=_helpers.cache_clear)
