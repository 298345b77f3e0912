"""Updates of tables that are queued on a GPU, without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from stampede.optim.nonfinite import NonFiniteFlag, NonFiniteGradientError
from stampede.optim.sharded.lookups import LookupGradient
from stampede.optim.table_array import TableArray

if TYPE_CHECKING:
    from stampede.optim.sharded.tables import CowClipTables
    from stampede.optim.triton.runs import SortedRuns
    from stampede.optim.triton.sum_runs import RowSums


def can_be_queued_everywhere(
    here: bool, device: torch.device, everyone: dist.ProcessGroup | None
) -> bool:
    """Whether all ranks can queue the updates of a collection; all must ask.

    Args:
        here: whether this rank can.
        everyone: all ranks; None for one process.
    """
    if everyone is None:
        return here
    able = torch.tensor(int(here), device=device)
    dist.all_reduce(able, op=dist.ReduceOp.MIN, group=everyone)
    return bool(able)


def why_not_queued(tables: Sequence[CowClipTables], has_helen: bool) -> str | None:
    """Why the updates of a collection cannot be queued on this rank; None if they can.

    Args:
        tables: of the collection on this rank.
        has_helen: whether the optimizer of any is Helen.
    """
    if has_helen:
        return "Helen moves rows between two lookups of a step"
    for tbe in tables:
        reason = tbe.why_not_queued()
        if reason is not None:
            names = ", ".join(sorted({shard.table for a in tbe.arrays for shard in a.shards}))
            return f"tables {names:.200}: {reason}"
    return None


class UpdateQueue:
    """Updates by the Triton kernels, all of them or none in a step.

    First all gradients are measured; a value that is not finite sets a flag, on all ranks; then
    the kernels step the rows, unless the flag is set. The host reads the flag some steps later.

    Args:
        device: of the tables.
        everyone: all ranks; None for one process.

    Attributes:
        flag: forbids the updates.
    """

    def __init__(self, device: torch.device, everyone: dist.ProcessGroup | None) -> None:
        self.flag = NonFiniteFlag(device)
        self._everyone = everyone
        self._updates = 0
        # Of each update that was not checked yet, the tables with the step they were at.
        self._unchecked: dict[int, list[tuple[CowClipTables, int]]] = {}

    @torch.no_grad()
    def update(
        self, tables: Sequence[CowClipTables], lookups: Mapping[CowClipTables, LookupGradient]
    ) -> None:
        """Queue a step of tables that `can_be_queued`.

        Args:
            tables: all that are to step; the loss need not depend on each of them.
            lookups: with their gradients.

        Raises:
            NonFiniteGradientError: an earlier step was not finite; see `check`.
        """
        from stampede.optim.triton.update import measure_rows

        # A gradient that was not finite in an earlier step has set it.
        flag = self.flag.tensor
        measured: dict[CowClipTables, tuple[SortedRuns, RowSums]] = {}
        for tbe in tables:
            if tbe in lookups:
                parts, grad = lookups[tbe]
                runs = parts[0].lookup.runs
                measured[tbe] = runs, measure_rows(tbe.arrays[0], runs, grad, flag)
        if self._everyone is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._everyone)
        self._updates += 1
        self._unchecked[self._updates] = [(tbe, int(tbe.step_count)) for tbe in tables]
        for tbe in tables:
            _step(tbe, tbe.arrays[0], measured.get(tbe), flag)
        self.flag.end_step(self._updates)
        self.check()

    def settle(self) -> None:
        """Before an update that is not queued: raise what was found up to now, on all ranks.

        Raises:
            NonFiniteGradientError: see `check`; or the flag was set for the step about to be taken.
        """
        self.check(up_to_now=True)
        if self._everyone is not None:
            dist.all_reduce(self.flag.tensor, op=dist.ReduceOp.MAX, group=self._everyone)
        if self.flag.tensor.item():
            self.flag.tensor.zero_()
            raise NonFiniteGradientError("the loss is not finite; no table was changed")

    def check(self, *, up_to_now: bool = False) -> None:
        """See `BackwardUpdate.check_queued`."""
        bad = self.flag.bad_step(up_to_now=up_to_now)
        unread = self.flag.unread
        if bad is None:
            for number in [n for n in self._unchecked if n not in unread]:
                del self._unchecked[number]
            return
        undone = [self._unchecked[number] for number in sorted(self._unchecked) if number >= bad]
        self._unchecked = {}
        for before in reversed(undone):
            for tbe, step in before:
                tbe.rewind(step)
        ago = self._updates - bad
        # A rank without tables knows no more than how long ago.
        when = f"in step {undone[0][0][1] + 1}" if undone[0] else f"{ago} steps ago"
        raise NonFiniteGradientError(
            f"the loss, or the gradient of an embedding row, was not finite {when}; the tables are "
            "as before that step, and the steps queued after it were not taken",
            ago,
        )


def _step(
    tbe: CowClipTables,
    array: TableArray,
    measured: tuple[SortedRuns, RowSums] | None,
    flag: Tensor,
) -> None:
    """Step the rows of the batch, and others as far as it is their turn."""
    from stampede.optim.triton.update import step_rows_

    lr, step, missed = tbe.get_learning_rate(), int(tbe.step_count) + 1, array.missed
    if missed is not None:
        missed.set_step(step - 1)
        missed.begin_step(array, lr)
    if measured is not None:
        step_rows_(
            array,
            *measured,
            lr=lr,
            step=step,
            nonfinite=flag,
            row_counts=tbe.row_counts,
            last=None if missed is None else missed.last,
        )
    if missed is not None:
        # How many rows the batch holds is known on the device only.
        missed.end_step(array, is_swept=False)
    tbe.step_count += 1
