"""The update of one array's rows by a batch: sum, measure, clip, step, without a wait."""

from __future__ import annotations

import torch
from torch import Tensor

from stampede.optim.rules import Adam
from stampede.optim.rules.adam import step_constants
from stampede.optim.table_array import TableArray
from stampede.optim.triton.block_sizes import MAX_COLUMNS
from stampede.optim.triton.runs import SortedRuns
from stampede.optim.triton.sum_runs import RowSums, sum_runs
from stampede.optim.triton.update_rows import update_rows_


def why_not(array: TableArray) -> str | None:
    """Why the kernels cannot update an array, or None if they can."""
    settings, dim = array.settings, array.weights.shape[1]
    if type(settings.rule) is not Adam:
        return f"the rule is {type(settings.rule).__name__}, not Adam"
    if settings.clip.by_table:
        return f"granularity {settings.clip.granularity!r} needs sums over whole tables"
    if settings.on_nonfinite != "error":
        return f"on_nonfinite is {settings.on_nonfinite!r}"
    if array.frozen_row is not None:
        return "a row is frozen"
    if array.weights.dtype != torch.float32:
        return f"the weights are {array.weights.dtype}, not float32"
    if dim % 4 or not 4 <= dim <= MAX_COLUMNS:
        return f"{dim} columns are no multiple of 4 up to {MAX_COLUMNS}"
    return None


@torch.no_grad()
def measure_rows(array: TableArray, runs: SortedRuns, grad: Tensor, nonfinite: Tensor) -> RowSums:
    """First half of a step: gradients and squared norms of the batch's rows.

    Where several arrays must all change or all stay, or norms need sums over column shards, it is
    taken of each before `step_rows_` of each.

    Args:
        array: weights, states and settings; see `why_not`.
        runs: the lookup's ids, sorted by row.
        grad: gradient of the lookup's output, float: `[batch, features * dim]` of a pooled lookup,
            `[occurrences, dim]` of a sequence.
        nonfinite: `[1]` int32 on the device; the number of rows whose gradient is not finite is
            added to it.

    Raises:
        ValueError: the kernels cannot update this array.
    """
    reason = why_not(array)
    if reason is not None:
        raise ValueError(f"the Triton kernels cannot update this array: {reason}; take update_")
    # Arrays of other widths lie beside this one in a pooled output.
    return sum_runs(
        runs,
        grad.contiguous().view(-1, array.weights.shape[1]),
        array.weights,
        clipped=array.local_width,
        l2=array.settings.l2,
        nonfinite=nonfinite,
    )


@torch.no_grad()
def step_rows_(
    array: TableArray,
    runs: SortedRuns,
    sums: RowSums,
    *,
    lr: float,
    step: int,
    nonfinite: Tensor,
    row_counts: Tensor | None = None,
    last: Tensor | None = None,
) -> None:
    """Second half: clip the batch's rows and step them, in place, without waiting for the device.

    Other rows stay as they are: under `rows="all"` the caller sweeps them, or replays their steps
    later (`catch_up_rows_`).

    Args:
        array, runs, nonfinite: as for `measure_rows`; unless `nonfinite` is 0 nothing is written.
        sums: of `measure_rows`, with squared norms over all columns of the rows.
        lr: learning rate.
        step: number of this step, counted from 1.
        row_counts: `[2]` or more, int64, on the device; touched and clipped rows are added to the
            first two, if `array.counts_rows`.
        last: `[rows]` int32, the step each row is at; becomes `step` in the batch's rows.
    """
    settings, rule = array.settings, array.settings.rule
    update_rows_(
        array.weights,
        array.states["exp_avg"],
        array.states["exp_avg_sq"],
        runs,
        sums,
        clip=settings.clip,
        width=array.width,
        clipped=array.local_width,
        betas=rule.betas,
        constants=step_constants(rule, lr, step, settings.weight_decay),
        nonfinite=nonfinite,
        row_counts=row_counts if array.counts_rows else None,
        last=last,
        step=step,
    )
