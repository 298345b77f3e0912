"""The update of tables from the gradients of a batch's rows: L2, clip, step of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from stampede.optim.backends.torch import Measured, PendingUpdate
from stampede.optim.clip import row_factor
from stampede.optim.nonfinite import NonFiniteGradientError
from stampede.optim.table_array import TableArray


class Reduction(Protocol):
    """What the ranks of a sharded collection tell each other, in the same order on all of them."""

    def sum_columns_(self, each: Sequence[tuple[TableArray, Tensor | None, Tensor]]) -> None:
        """Add up the values of rows over the column shards of their table, in place.

        Args:
            each: an array, the rows `[n]` (sorted; None for all), and their values `[k, n]`.
        """

    def refuses(self, found: bool) -> bool:
        """Whether any rank found a gradient that the settings do not allow."""


@torch.no_grad()
def update_(updates: Sequence[PendingUpdate], reductions: Sequence[Reduction] = ()) -> list[Tensor]:
    """One step of several arrays of tables, in place.

    No dense gradient of a table is made.

    Args:
        reductions: of the collections that the tables are from, if they are sharded.

    Returns:
        For each array `[3]` int64, how many of the batch's rows were touched, clipped and skipped.
        A row in several column shards or copies is counted in the first one only.

    Raises:
        NonFiniteGradientError: a gradient is not finite, and the settings do not allow it.
    """
    each: list[tuple[PendingUpdate, Measured | None]] = []
    for update in updates:
        frozen, batch = update.array.frozen_row, update.batch
        if frozen is not None:
            update = replace(update, batch=batch.where(batch.rows != frozen))
        # None: the step is taken in one pass, once it is known that no rank refuses it.
        at_once = update.backend.can_step_at_once(update.batch)
        each.append((update, None if at_once else _measured(update)))
    steps = [one for _, one in each if one is not None]
    of_batch = [(s.update.array, s.update.batch.rows, s.values) for s in steps]
    of_all = [(s.update.array, None, s.everything) for s in steps if s.everything is not None]
    for values in (of_batch, of_all):
        for reduction in reductions:
            reduction.sum_columns_(values)
    is_refused = _leave_out_nonfinite(steps)
    for reduction in reductions:
        is_refused = reduction.refuses(is_refused)
    if is_refused:
        raise NonFiniteGradientError(
            "the gradient of an embedding row is not finite; no table of its collection was "
            "changed (on_nonfinite='skip_row' would leave such rows out)"
        )
    row_counts = []
    for update, one in each:
        if one is None:
            clipped = update.backend.step_at_once_(update.batch, update.lr, update.step)
            counts = torch.tensor([len(update.batch.rows), clipped, 0])
        else:
            factor, swept_factor = _factors(one)
            update.backend.step_(one, factor, swept_factor)
            rows = one.update.batch.rows
            counts = rows.new_tensor([len(rows), 0, one.skipped])
            if factor is not None:
                counts[1] = (factor < 1).sum()
        row_counts.append(counts * update.array.counts_rows)
    return row_counts


def _measured(update: PendingUpdate) -> Measured:
    grads, values = update.backend.measure(update.batch)
    needs_all = update.array.settings.needs_all_rows
    everything = update.backend.measure_all() if needs_all else None
    return Measured(replace(update, batch=update.batch._replace(grads=grads)), values, everything)


def _leave_out_nonfinite(steps: Sequence[Measured]) -> bool:
    """Skip rows with a NaN or an infinity; whether the settings of one forbid that.

    All column shards see the same sum.
    """
    finite = [torch.isfinite(one.values[0] + one.values[1]) for one in steps]
    bad = torch.stack([(~rows).sum() for rows in finite]) if finite else torch.zeros(0)
    is_refused = False
    for one, kept, count in zip(steps, finite, bad.tolist(), strict=True):
        if count:
            one.skipped = count
            one.update = replace(one.update, batch=one.update.batch.where(kept))
            one.values = one.values[:, kept]
            is_refused |= one.update.array.settings.on_nonfinite == "error"
    return is_refused


def _factors(one: Measured) -> tuple[Tensor | None, Tensor | None]:
    """Factors of the gradients: of the batch's rows and of all rows; None for 1."""
    array, counts, everything = one.update.array, one.update.batch.counts, one.everything
    clip = array.settings.clip
    if not clip.clips:
        return None, None
    factor = row_factor(one.values[0], one.values[2], counts, array.width, clip)
    if not clip.may_clip_decay(array.settings.l2) or everything is None:
        return factor, None
    once = torch.ones_like(everything[0])
    return factor, row_factor(everything[0], everything[2], once, array.width, clip)
