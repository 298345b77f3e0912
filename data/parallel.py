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

# More cores would wait for each other, and for memory.
_MOST_CORES = 4


def computed_ahead(
    function: Callable[[T], R], arguments: Iterable[T], count: int, threads: int = 1
) -> Iterator[R]:
    """`map(function, arguments)`, with up to `count` results computed before they are asked for.

    Results come in order, and so do the calls of a single thread. Exceptions are raised where their
    result is asked for. The threads end with the iterator: at its end, when it is closed, or when
    it is garbage-collected, as after a break. With a `count` of 0 there is no thread.
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

    The calls are shared by as many threads as torch uses, at most 4, this one among them. Unlike
    OpenMP's they do not spin while they wait, which a busy machine would pay for. After a call that
    fails no other begins; its exception is raised when all have ended.
    """
    import torch  # here, as preparing data needs no torch

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
        # A helper that other callers have kept busy until now has nothing left to do.
        begun = [helper for helper in helping if not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()


@lru_cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_CORES - 1, thread_name_prefix="stampede-gather")


# A forked process has the pool but not its threads.
os.register_at_fork(after_in_child=_helpers.cache_clear)
