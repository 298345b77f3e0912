"""Work shared by several cores."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")

# More wait for each other, and for the memory.
_MOST_CORES = 4


def run_tasks(function: Callable[[T], None], arguments: Sequence[T]) -> None:
    """Call a function that leaves the interpreter to others, as numpy's do, for each argument.

    After one that fails no other begins; all have ended, and its exception is raised.

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
        # One that has not begun, as other callers keep the threads busy, has nothing left to do.
        begun = [helper for helper in helping if not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()


@lru_cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_CORES - 1, thread_name_prefix="stampede-gather")


# A fork has the pool but not its threads.
os.register_at_fork(after_in_child=_helpers.cache_clear)
