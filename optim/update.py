"""The update of tables from the gradients of a batch's rows: L2, clip, step of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stampede.optim.backends.torch import Measured, PendingUpdate
from stampede.optim.clip import (
    CowClip,
    TableSums,
    row_factor,
    table_factor,
)
from stampede.optim.nonfinite import NonFiniteGradientError
from stampede.optim.table_array import TableArray


class Reduction(Protocol):
    """Sums over the shards of tables, in the same order on all ranks."""

    device: torch.device

    def sum_columns_(self, each: Sequence[tuple[TableArray, Tensor | None, Tensor]]) -> None:
        """Add up the values of rows over the column shards of their table, in place.

        Args:
            each: an array, the rows `[n]` (sorted; None for all), and their values `[k, n]`.
        """

    def sum_tables_(self, sums: TableSums) -> None:
        """Add up over ranks, in place; without the sum over all tables clipped together."""


@torch.no_grad()
def update_(
    updates: Sequence[PendingUpdate],
    reductions: Sequence[Reduction] = (),
    together: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """One step of several arrays of tables, in place.

    No dense gradient of a table is made. Tables clipped together (`global`) must be in one call.

    Args:
        reductions: of the collections that the tables are from, if they are sharded.
        together: the ranks over which tables are clipped together.

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
    _leave_out_nonfinite(steps)
    # A rank may have no tables.
    device = updates[0].batch.grads.device if updates else reductions[0].device
    sums = _table_sums(steps, device)
    for reduction in reductions:
        reduction.sum_tables_(sums)
    if together is not None:
        everything = sums.parts.setdefault(None, sums.nonfinite.new_zeros(2))
        dist.all_reduce(everything, group=together)
    if sums.nonfinite:
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
            factor, swept_factor = _factors(one, sums)
            update.backend.step_(one, factor, swept_factor)
            rows = one.update.batch.rows
            counts = rows.new_tensor([len(rows), 0, one.skipped])
            if factor is not None:
                counts[1] = (factor < 1).sum()
        row_counts.append(counts * update.array.counts_rows)
    return row_counts


def _measured(update: PendingUpdate) -> Measured:
    settings = update.array.settings
    grads, values = update.backend.measure(update.batch)
    everything = update.backend.measure_all() if settings.needs_all_rows else None
    one = Measured(replace(update, batch=update.batch._replace(grads=grads)), values, everything)
    if settings.clip.by_table:
        one.share = values[:3].clone()
        one.whole_share = None if everything is None else everything[:3].clone()
    return one


def _leave_out_nonfinite(steps: Sequence[Measured]) -> None:
    """Skip rows with a NaN or an infinity; all column shards see the same sum."""
    finite = [torch.isfinite(one.values[0] + one.values[1]) for one in steps]
    bad = torch.stack([(~rows).sum() for rows in finite]) if finite else torch.zeros(0)
    for one, kept, count in zip(steps, finite, bad.tolist(), strict=True):
        if count:
            one.skipped = count
            one.update = replace(one.update, batch=one.update.batch.where(kept))
            one.values = one.values[:, kept]
            one.share = None if one.share is None else one.share[:, kept]


def _table_sums(steps: Sequence[Measured], device: torch.device) -> TableSums:
    """This rank's part of the sums over tables."""
    sums = TableSums(nonfinite=torch.zeros((), dtype=torch.float64, device=device))
    for one in steps:
        array, settings = one.update.array, one.update.array.settings
        if settings.on_nonfinite == "error" and array.counts_rows:
            sums.nonfinite += one.skipped
        if not settings.clip.by_table:
            continue
        for shard, part in zip(array.shards, _shard_sums(one), strict=True):
            key = _key(shard.table, settings.clip)
            part = part if shard.counted else part.zero_()
            sums.parts[key] = sums.parts[key] + part if key in sums.parts else part
    return sums


def _shard_sums(one: Measured) -> list[Tensor]:
    """Squared norms of gradient and weights of each shard, float64 `[2]`."""
    array, bounds = one.update.array, one.update.bounds()
    taken = one.share[[0, 2]].double()
    if one.whole_share is None:
        return [taken[:, a:b].sum(1) for a, b in pairwise(bounds)]
    whole = one.whole_share[[0, 2]].double()
    # The sum over all rows counts the batch's rows as if they had no gradient.
    swept = whole[:, one.update.batch.rows]
    sums = []
    for (first, stop), (a, b) in zip(pairwise(array.starts), pairwise(bounds), strict=True):
        total = whole[:, first:stop].sum(1)
        total[0] += taken[0, a:b].sum() - swept[0, a:b].sum()
        sums.append(total)
    return sums


def _factors(one: Measured, sums: TableSums) -> tuple[Tensor | None, Tensor | None]:
    """Factors of the gradients: of the batch's rows and of all rows; None for 1."""
    array, (_, grads, counts), everything = one.update.array, one.update.batch, one.everything
    clip = array.settings.clip
    if clip.granularity == "none":
        swept = one.update.swept_decay_factor
        return None, None if swept is None else _repeated(swept.to(grads.dtype), array.starts)
    if clip.by_row:
        factor = row_factor(one.values[0], one.values[2], counts, array.width, clip)
        if not clip.may_clip_decay(array.settings.l2) or everything is None:
            return factor, None
        once = torch.ones_like(everything[0])
        return factor, row_factor(everything[0], everything[2], once, array.width, clip)
    held = torch.stack([sums.parts[_key(shard.table, clip)] for shard in array.shards])
    by_shard = table_factor(*held.T, clip).to(grads.dtype)
    swept = None if everything is None else _repeated(by_shard, array.starts)
    return _repeated(by_shard, one.update.bounds()), swept


def _key(table: str, clip: CowClip) -> str | None:
    return None if clip.granularity == "global" else table


def _repeated(by_shard: Tensor, bounds: list[int]) -> Tensor:
    """Repeat one value per shard for each of its rows, which end at these bounds."""
    return by_shard.repeat_interleave(torch.tensor(bounds, device=by_shard.device).diff())
