"""Work that all ranks of a group do at the same time, and that fails on all or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from stampede.engine.checkpoint.tensors import reason

T = TypeVar("T")


class FailedSomewhereError(Exception):
    """An action failed on one rank or several; all of them raise it, with one message."""


def together(action: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """Run `action` on every rank; each gets the results of all, by rank.

    Raises:
        FailedSomewhereError: it failed on some rank.
    """
    try:
        outcome = (action(), None)
    except Exception as failure:
        # As text: not every exception can be sent.
        outcome = (None, reason(failure))
    outcomes = [outcome] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            where = f" on rank {rank}" if len(outcomes) > 1 else ""
            raise FailedSomewhereError(f"{failure}{where}")
    return [result for result, _ in outcomes]
