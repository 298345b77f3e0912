"""The update of tables from the gradients of a batch's rows: L2, clip, step of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from stampede.optim.clip import row_factor, table_factor
from stampede.optim.missed_steps import steps_by_kernel, take_step_
from stampede.optim.native import kernels
from stampede.optim.nonfinite import NonFiniteGradientError
from stampede.optim.one_pass import is_one_pass, step_in_one_pass_
from stampede.optim.reduction import NoReduction, PendingUpdate, Reduction, TableSums
from stampede.optim.row_values import RowValues, all_values, batch_values
from stampede.optim.rows import RowGradients
from stampede.optim.sweep import sweep_
from stampede.optim.table_array import TableArray


@dataclass
class Outcome:
    """What happened to the batch's rows of one array: int64 scalars on its device.

    A row that lies in several column shards or copies is counted in the first one only.
    """

    touched: Tensor
    clipped: Tensor
    skipped: Tensor


@dataclass
class _Work:
    """An update under way.

    Attributes:
        grads: `[n, dim]` of the batch's rows, L2 included.
        values: of the batch's rows, over all their columns once these are summed.
        share: `[3, n]` this array's own part of the values, where sums over tables are needed.
        everything, whole_share: the same of all rows, where they are needed.
        skipped: rows left out for a gradient that is not finite.
    """

    update: PendingUpdate
    batch: RowGradients
    grads: Tensor
    values: RowValues
    share: Tensor | None
    everything: RowValues | None
    whole_share: Tensor | None
    skipped: Tensor

    @property
    def array(self) -> TableArray:
        return self.update.array

    def keep(self, kept: Tensor) -> None:
        """Drop the batch's rows that are not marked in `kept`, `[n]` bool."""
        self.batch = RowGradients(*(part[kept] for part in self.batch))
        self.grads = self.grads[kept]
        self.values = self.values[kept]
        if self.share is not None:
            self.share = self.share[:, kept]


@torch.no_grad()
def update_(updates: Sequence[PendingUpdate], reduction: Reduction | None = None) -> list[Outcome]:
    """One step of several arrays of tables, in place.

    No gradient of a table's size is made. The rows that are not in the batch are swept, or take
    their steps later (`TableArray.missed`).

    Args:
        updates: arrays and their gradients; tables that are clipped together (`global`) must come
            in one call.
        reduction: adds up over shards; None for whole tables in one process.

    Returns:
        What happened, for each array.

    Raises:
        NonFiniteGradientError: a gradient is not finite where the settings do not allow it.
    """
    reduction = reduction or NoReduction()
    updates = [_without_frozen_row(update) for update in updates]
    # None: in one pass, once it is known that no rank refuses the step.
    each = [None if is_one_pass(update) else _begin(update) for update in updates]
    works = [work for work in each if work is not None]
    _sum_columns(works, reduction)
    _leave_out_nonfinite(works)
    device = updates[0].batch.grads.device if updates else reduction.device
    sums = _table_sums(works, device)
    reduction.sum_tables_(sums)
    if sums.nonfinite:
        raise NonFiniteGradientError(
            "the gradient of an embedding row is not finite; no table of its collection was "
            "changed (on_nonfinite='skip_row' would leave such rows out)"
        )
    return [
        _step_in_one_pass(update) if work is None else _finish(work, sums)
        for update, work in zip(updates, each, strict=True)
    ]


def _without_frozen_row(update: PendingUpdate) -> PendingUpdate:
    frozen, batch = update.array.frozen_row, update.batch
    if frozen is None:
        return update
    return replace(update, batch=RowGradients(*(part[batch.rows != frozen] for part in batch)))


def _step_in_one_pass(update: PendingUpdate) -> Outcome:
    clipped, counted = step_in_one_pass_(update), int(update.array.counts_rows)
    numbers = len(update.batch.rows), clipped, 0
    return Outcome(*(torch.tensor(number * counted) for number in numbers))


def _begin(update: PendingUpdate) -> _Work:
    """Measure the batch's rows."""
    array, batch, settings = update.array, update.batch, update.array.settings
    grads, values = batch_values(array, batch)
    everything = None
    if settings.needs_all_rows:
        everything = all_values(array)
        if array.frozen_row is not None:
            everything.matrix[:3, array.frozen_row] = 0.0
    # Sums over a table add up its column shards: they need each shard's own part.
    by_table = settings.clip.by_table
    return _Work(
        update,
        batch,
        grads,
        values,
        values.matrix[:3].clone() if by_table else None,
        everything,
        everything.matrix[:3].clone() if by_table and everything is not None else None,
        torch.zeros((), dtype=torch.int64, device=grads.device),
    )


def _sum_columns(works: Sequence[_Work], reduction: Reduction) -> None:
    """Make the values of rows those of all their columns."""
    reduction.sum_columns_(
        [work.update for work in works],
        [work.values.matrix for work in works],
        all_rows=False,
    )
    whole = [work for work in works if work.everything is not None]
    reduction.sum_columns_(
        [work.update for work in whole],
        [work.everything.matrix for work in whole],
        all_rows=True,
    )


def _leave_out_nonfinite(works: Sequence[_Work]) -> None:
    """Treat rows with a NaN or an infinity as absent; all column shards see the same sum."""
    finite = [torch.isfinite(work.values.grad_squares + work.values.rest_squares) for work in works]
    bad = torch.stack([(~rows).sum() for rows in finite]) if finite else torch.zeros(0)
    for work, rows, count in zip(works, finite, bad.tolist(), strict=True):
        if count:
            work.skipped += count
            work.keep(rows)


def _table_sums(works: Sequence[_Work], device: torch.device) -> TableSums:
    """This rank's part of the sums over tables."""
    sums = TableSums(nonfinite=torch.zeros((), dtype=torch.float64, device=device))
    for work in works:
        settings, array = work.array.settings, work.array
        if settings.on_nonfinite == "error" and array.counts_rows:
            sums.nonfinite += work.skipped
        if work.share is None:
            continue
        for shard, total in zip(array.shards, _shard_sums(work), strict=True):
            if not shard.counted:
                total = torch.zeros_like(total)
            if settings.clip.granularity == "global":
                known = sums.everything
                sums.everything = total if known is None else known + total
            else:
                known = sums.by_table.get(shard.table)
                sums.by_table[shard.table] = total if known is None else known + total
    return sums


def _shard_sums(work: _Work) -> list[Tensor]:
    """Squared norms of gradient and weights of each shard, float64 `[2]`."""
    bounds = work.update.bounds_of(work.batch.rows)
    taken = work.share[[0, 2]].double()
    if work.whole_share is None:
        return [taken[:, a:b].sum(1) for a, b in pairwise(bounds)]
    whole = work.whole_share[[0, 2]].double()
    # The batch's rows stand in the sum over all rows as if they had no gradient.
    swept = whole[:, work.batch.rows]
    starts = work.array.starts
    sums = []
    for (first, stop), (a, b) in zip(pairwise(starts), pairwise(bounds), strict=True):
        total = whole[:, first:stop].sum(1)
        total[0] += taken[0, a:b].sum() - swept[0, a:b].sum()
        sums.append(total)
    return sums


def _finish(work: _Work, sums: TableSums) -> Outcome:
    """Clip, and take the step."""
    array = work.array
    factor, swept_factor = _factors(work, sums)
    clipped = torch.zeros_like(work.skipped)
    if factor is not None:
        clipped = (factor < 1).sum()
    lr, step, rows = work.update.lr, work.update.step, work.batch.rows
    if array.missed is not None and array.missed.is_queued:
        # The Triton kernels sum themselves; with sums, all rows step at once.
        array.missed.set_step(step - 1)
        array.missed.flush(array)
        _step_with_sweep(work, factor, swept_factor)
        array.missed.all_are_at(step)
    elif steps_by_kernel(array):
        take_step_(
            array,
            lr,
            step,
            len(rows),
            lambda constants, last, step: kernels.adam_rows_(
                *array.adam_tensors(),
                rows,
                work.grads,
                factor,
                array.local_width,
                constants,
                array.settings.rule.betas,
                last,
                step,
            ),
        )
    else:
        _step_with_sweep(work, factor, swept_factor)
    counted = int(array.counts_rows)
    touched = torch.full_like(work.skipped, len(work.batch.rows))
    return Outcome(touched * counted, clipped * counted, work.skipped * counted)


def _step_with_sweep(work: _Work, factor: Tensor | None, swept_factor: Tensor | None) -> None:
    """Take the batch's rows out, step them, sweep all rows, and put the batch's back."""
    array, update, settings = work.array, work.update, work.array.settings
    if factor is not None:
        work.grads[:, : array.local_width].mul_(factor[:, None])
    rows = work.batch.rows
    weights = array.taken(rows)
    states = {name: array.states[name][rows] for name in array.element_state_names}
    states |= work.values.states(array)
    if settings.weight_decay:
        weights.mul_(1.0 - update.lr * settings.weight_decay)
    settings.rule.step_(
        weights,
        work.grads,
        states,
        work.values.after_clip(factor, array),
        lr=update.lr,
        step=update.step,
    )
    _sweep_others(work, swept_factor)
    array.weights.index_copy_(0, rows, array.rounded(weights, rows, update.step))
    for name, values in states.items():
        array.states[name].index_copy_(0, rows, values)


def _factors(work: _Work, sums: TableSums) -> tuple[Tensor | None, Tensor | None]:
    """What gradients are multiplied by: of the batch's rows, and of all rows; None for 1."""
    array, clip = work.array, work.array.settings.clip
    if clip.granularity == "none":
        return None, _by_row(array, work.update.swept_decay_factor, work.grads.dtype)
    values, everything = work.values, work.everything
    if clip.by_row:
        factor = row_factor(
            values.grad_squares, values.weight_squares, work.batch.counts, array.width, clip
        )
        if not clip.may_clip_decay(array.settings.l2) or everything is None:
            return factor, None
        once = torch.ones_like(everything.grad_squares)
        return factor, row_factor(
            everything.grad_squares, everything.weight_squares, once, array.width, clip
        )
    if clip.granularity == "global":
        held = [sums.everything for _ in array.shards]
    else:
        held = [sums.by_table[shard.table] for shard in array.shards]
    grads, weights = torch.stack(held).T
    by_shard = table_factor(grads, weights, clip).to(work.grads.dtype)
    bounds = torch.tensor(work.update.bounds_of(work.batch.rows)).diff().to(by_shard.device)
    factor = by_shard.repeat_interleave(bounds)
    return factor, None if everything is None else _by_row(array, by_shard, by_shard.dtype)


def _by_row(array: TableArray, by_shard: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """One value for every row of an array, from one for each shard."""
    if by_shard is None:
        return None
    lengths = torch.tensor([shard.rows for shard in array.shards], device=by_shard.device)
    return by_shard.to(dtype).repeat_interleave(lengths)


def _sweep_others(work: _Work, factor: Tensor | None) -> None:
    """Step all rows as if absent; the batch's are written over afterwards."""
    array, update = work.array, work.update
    if not array.settings.moves_untouched_rows:
        return
    with array.keeping_frozen_row():
        sweep_(array, work.everything, factor, lr=update.lr, step=update.step)
