"""Adam's steps for the rows of a batch, and the missed steps of waiting rows.

Additions are fused with multiplications only where `fma` says so (`enable_fp_fusion=False` in every
launch); roots and quotients are rounded correctly. So a step has the same bits in all kernels,
alone or replayed with others. Only the C++ kernel's replay with AVX-512 differs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stampede.optim.lookup import SortedRuns
from stampede.optim.table_array import TableArray
from stampede.optim.triton import RowSums, block_sizes


@triton.jit
def adam_step(w, m, v, g, beta1, rest1, beta2, rest2, alpha, eps, keep):
    """Weights and both moments after a step; `rest1` is `1 - beta1`."""
    m = tl.fma(m, beta1, rest1 * g)
    v = tl.fma(v, beta2, rest2 * g * g)
    w = tl.fma(w, keep, -tl.div_rn(alpha * m, tl.sqrt_rn(v) + eps))
    return w, m, v


def update_rows_(
    array: TableArray,
    runs: SortedRuns,
    sums: RowSums,
    *,
    constants: tuple[float, float, float],
    nonfinite: Tensor,
    row_counts: Tensor,
    last: Tensor | None,
    step: int,
) -> None:
    """Clip and step the rows of a batch, in place; nothing is written if `nonfinite` is not 0.

    Args:
        array: float32, of an Adam that clips by row or not at all.
        sums: gradients and squared norms of the rows, over all their columns.
        constants: of this step, see `step_constants`.
        row_counts: int64; touched and clipped rows are added, if the array counts rows.
        last: `[rows]` int32; set to `step` in the rows of the batch.
    """
    if not runs.capacity:
        return
    dim, clip = array.weights.shape[1], array.settings.clip
    sizes, betas = block_sizes(dim, runs.occurrences), array.settings.rule.betas
    clips = clip.granularity != "none"
    ratio, lowest = clip.row_bounds(array.width) if clips else (0.0, 0.0)
    _update_rows[(triton.cdiv(runs.capacity, sizes.rows),)](
        *array.adam_tensors(),
        *sums,
        runs.capacity,
        runs.rows,
        runs.starts,
        runs.count,
        nonfinite,
        row_counts if array.counts_rows else None,
        last,
        step,
        float(ratio),
        float(lowest),
        float(betas[0]),
        1.0 - betas[0],
        float(betas[1]),
        1.0 - betas[1],
        *map(float, constants),
        CLIPS=clips,
        COUNTS=array.counts_rows,
        MARKS=last is not None,
        CLIPPED=array.local_width,
        DIM=dim,
        COLUMNS=sizes.columns,
        ROWS=sizes.rows,
        num_warps=sizes.row_warps,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["step"])
def _update_rows(
    weights,
    exp_avg,
    exp_avg_sq,
    grads,
    squares,
    capacity,
    rows,
    starts,
    count,
    nonfinite,
    row_counts,
    last,
    step,
    ratio,
    lowest,
    beta1,
    rest1,
    beta2,
    rest2,
    alpha,
    eps,
    keep,
    CLIPS: tl.constexpr,
    COUNTS: tl.constexpr,
    MARKS: tl.constexpr,
    CLIPPED: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Clip and step a tile of rows."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    number = tl.load(count)
    if (first < number) & (tl.load(nonfinite) == 0):
        run = first + tl.arange(0, ROWS)
        here = run < number
        column = tl.arange(0, COLUMNS)
        mask = here[:, None] & (column < DIM)[None, :]
        row = tl.load(rows + run, mask=here, other=0)
        at = row[:, None] * DIM + column[None, :]
        g = tl.load(grads + run[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        if CLIPS:
            norm = tl.sqrt_rn(tl.load(squares + run, mask=here, other=0.0))
            of_weights = tl.sqrt_rn(tl.load(squares + 2 * capacity + run, mask=here, other=0.0))
            times = tl.load(starts + run + 1, mask=here, other=0) - tl.load(
                starts + run, mask=here, other=0
            )
            # Infinity times 0 is NaN; the maximum is then the other argument.
            threshold = tl.maximum(ratio * of_weights, lowest) * tl.maximum(times, 1).to(tl.float32)
            # Divide only above the threshold: a zero row would give 0 / 0.
            is_above = here & (norm > threshold)
            factor = tl.where(is_above, tl.div_rn(threshold, tl.where(is_above, norm, 1.0)), 1.0)
            g = tl.where((column < CLIPPED)[None, :], g * factor[:, None], g)
        w = tl.load(weights + at, mask=mask, other=0.0)
        m = tl.load(exp_avg + at, mask=mask, other=0.0)
        v = tl.load(exp_avg_sq + at, mask=mask, other=0.0)
        w, m, v = adam_step(w, m, v, g, beta1, rest1, beta2, rest2, alpha, eps, keep)
        tl.store(weights + at, w, mask=mask)
        tl.store(exp_avg + at, m, mask=mask)
        tl.store(exp_avg_sq + at, v, mask=mask)
        if MARKS:
            tl.store(last + row, tl.zeros([ROWS], tl.int32) + step, mask=here)
        if COUNTS:
            if first == 0:
                tl.atomic_add(row_counts, number.to(tl.int64))
            if CLIPS:
                above = tl.sum(is_above.to(tl.int64), axis=0)
                if above > 0:
                    tl.atomic_add(row_counts + 1, above)


class Missed(NamedTuple):
    """Adam's steps after `first_step` up to `now`, which rows may have missed."""

    steps: Tensor  # `[window, 3]` float32, contiguous: constants of the steps after `first_step`.
    first_step: int
    now: int
    betas: tuple[float, float]
    l2: float
    nonfinite: Tensor  # `[1]` int32; if not 0, nothing is written.


# Weights and both moments, `[rows, dim]` float32, contiguous; the step each row is at, `[rows]`
# int32, at least `Missed.first_step`.
State = tuple[Tensor, Tensor, Tensor, Tensor]


def catch_up_range_(state: State, first_row: int, stop_row: int, missed: Missed) -> None:
    """Bring rows `first_row` up to `stop_row` to step `now`, in place."""
    _catch_up_(state, (None, None, first_row), stop_row - first_row, missed)
    last = state[3]
    # Set last: several programs update the columns of one row, and all read it.
    reached = torch.where(missed.nonfinite == 0, missed.now, 0).to(last.dtype)
    last[first_row:stop_row].clamp_(min=reached)


def catch_up_rows_(state: State, rows: Tensor, count: Tensor, missed: Missed) -> None:
    """Bring the first `count` of some distinct rows to step `now`, in place; see `SortedRuns`."""
    capacity = rows.numel()
    _catch_up_(state, (rows, count, 0), capacity, missed)
    if capacity:
        block, now, nonfinite = 256, missed.now, missed.nonfinite
        grid = (triton.cdiv(capacity, block),)
        _mark_rows[grid](state[3], rows, count, now, nonfinite, BLOCK=block)


def _catch_up_(
    state: State, which: tuple[Tensor | None, Tensor | None, int], number: int, missed: Missed
) -> None:
    dim = state[0].shape[1]
    sizes = block_sizes(dim, number)
    programs = triton.cdiv(number * dim, sizes.elements)
    steps, first_step, now, (beta1, beta2), l2, nonfinite = missed
    if not programs or now <= first_step:
        return
    _replay[(programs,)](
        *state,
        *which,
        number,
        steps,
        first_step,
        now,
        2.0 * l2,
        float(beta1),
        1.0 - beta1,
        float(beta2),
        1.0 - beta2,
        nonfinite,
        LISTED=which[0] is not None,
        DIM=dim,
        BLOCK=sizes.elements,
        num_warps=sizes.element_warps,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["first_row", "number", "first_step", "now"])
def _replay(
    weights,
    exp_avg,
    exp_avg_sq,
    last,
    rows,
    count,
    first_row,
    number,
    steps,
    first_step,
    now,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    nonfinite,
    LISTED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Replay the missed steps of some elements, a different number for each row."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = element // DIM
    if LISTED:
        here = place < tl.load(count)
        row = tl.load(rows + place, mask=here, other=0)
    else:
        here = place < number
        row = first_row + place
    since = tl.load(last + row, mask=here, other=now)
    earliest = tl.maximum(tl.min(since, axis=0), first_step)
    earliest = tl.where(tl.load(nonfinite) == 0, earliest, now)
    if earliest < now:
        at = row * DIM + (element - place * DIM)
        w = tl.load(weights + at, mask=here, other=0.0)
        m = tl.load(exp_avg + at, mask=here, other=0.0)
        v = tl.load(exp_avg_sq + at, mask=here, other=0.0)
        for step in range(earliest, now):
            constants = steps + (step - first_step) * 3
            alpha = tl.load(constants)
            eps = tl.load(constants + 1)
            keep = tl.load(constants + 2)
            next_w, next_m, next_v = adam_step(
                w, m, v, decay * w, beta1, rest1, beta2, rest2, alpha, eps, keep
            )
            missed = since <= step
            w = tl.where(missed, next_w, w)
            m = tl.where(missed, next_m, m)
            v = tl.where(missed, next_v, v)
        tl.store(weights + at, w, mask=here)
        tl.store(exp_avg + at, m, mask=here)
        tl.store(exp_avg_sq + at, v, mask=here)


@triton.jit(do_not_specialize=["now"])
def _mark_rows(last, rows, count, now, nonfinite, BLOCK: tl.constexpr) -> None:
    """Note that rows are at step `now`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = place < tl.load(count)
    row = tl.load(rows + place, mask=here, other=0)
    since = tl.load(last + row, mask=here, other=now)
    reached = tl.where(tl.load(nonfinite) == 0, tl.zeros([BLOCK], tl.int32) + now, 0)
    tl.store(last + row, reached, mask=here & (since < reached))
