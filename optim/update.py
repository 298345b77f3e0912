"""The update of tables from the gradients of a batch's rows: L2, clip, step of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from stampede.optim.nonfinite import NonFiniteGradientError
from stampede.optim.table_array import Measured, PendingUpdate, TableArray


class Reduction(Protocol):
    """What the ranks of a sharded collection tell each other, in the same order on all of them."""

    def sum_columns_(self, each: Sequence[tuple[TableArray, Tensor | None, Tensor]]) -> None:
        """Add up the values of rows over the column shards of their table, in place.

        Args:
            each: an array, the rows `[n]` (sorted; None for all), and their values `[k, n]`.
        """

    def refuses(self, found: bool) -> bool:
        """Whether any rank found a gradient that the settings do not allow."""
        ...


@torch.no_grad()
def update_(updates: Sequence[PendingUpdate], reductions: Sequence[Reduction] = ()) -> list[Tensor]:
    """One step of several arrays of tables, in place: all of them change, or none.

    No dense gradient of a table is made.

    Args:
        reductions: of the collections whose ranks tell each other something; of updates that are
            queued on a GPU, the queue.

    Returns:
        The counts of each array, see `Backend.step_`.

    Raises:
        NonFiniteGradientError: a gradient is not finite, and the settings do not allow it.
    """
    steps = [update.backend.measure(_without_frozen_row(update)) for update in updates]
    measured = [one for one in steps if one.values is not None]
    of_batch = [(one.update.array, one.update.batch.rows, one.values) for one in measured]
    of_all = [
        (one.update.array, None, one.everything) for one in measured if one.everything is not None
    ]
    for values in filter(None, (of_batch, of_all)):
        for reduction in reductions:
            reduction.sum_columns_(values)
    is_refused = _leave_out_nonfinite(measured)
    for reduction in reductions:
        is_refused = reduction.refuses(is_refused)
    if is_refused:
        raise NonFiniteGradientError(
            "the gradient of an embedding row is not finite; no table of its collection was "
            "changed (on_nonfinite='skip_row' would leave such rows out)"
        )
    return [one.update.backend.step_(one) for one in steps]


def _without_frozen_row(update: PendingUpdate) -> PendingUpdate:
    frozen, batch = update.array.frozen_row, update.batch
    return update if frozen is None else replace(update, batch=batch.where(batch.rows != frozen))


def _leave_out_nonfinite(steps: Sequence[Measured]) -> bool:
    """Skip rows with a NaN or an infinity; whether the settings of one forbid that.

    All column shards see the same sum.
    """
    finite = [torch.isfinite(one.values[0] + one.values[1]) for one in steps]
    bad = torch.stack([(~rows).sum() for rows in finite]).tolist() if finite else []
    is_refused = False
    for one, kept, count in zip(steps, finite, bad, strict=True):
        if count:
            one.skipped = count
            one.update = replace(one.update, batch=one.update.batch.where(kept))
            one.values = one.values[:, kept]
            is_refused |= one.update.array.settings.on_nonfinite == "error"
    return is_refused
