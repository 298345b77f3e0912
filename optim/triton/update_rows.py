"""Clip and Adam step of the rows of a batch, from their summed gradients."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stampede.optim.clip import CowClip
from stampede.optim.lookup import SortedRuns
from stampede.optim.triton.adam import adam_step
from stampede.optim.triton.block_sizes import BlockSizes, block_sizes
from stampede.optim.triton.sum_runs import RowSums


def update_rows_(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    runs: SortedRuns,
    sums: RowSums,
    *,
    clip: CowClip,
    width: int,
    clipped: int,
    betas: tuple[float, float],
    constants: tuple[float, float, float],
    nonfinite: Tensor,
    row_counts: Tensor | None = None,
    last: Tensor | None = None,
    step: int = 0,
    sizes: BlockSizes | None = None,
) -> None:
    """Clip and step the rows of a batch, in place; nothing is written if `nonfinite` is not 0.

    Args:
        weights, exp_avg, exp_avg_sq: `[rows, dim]` float32, contiguous.
        runs: the occurrences, for rows and counts.
        sums: gradients and squared norms of the rows, over all their columns.
        clip: granularity `none`, `row` or `cowclip`.
        width: number of clipped columns of the whole tables.
        clipped: how many of the array's first columns are clipped ones.
        betas: decay rates of the moments.
        constants: alpha, eps and keep of this step, see `stampede.optim.rules.step_constants`.
        nonfinite: `[1]` int32, rows whose gradient is not finite.
        row_counts: `[2]` or more, int64; touched and clipped rows are added to the first two.
        last: `[rows]` int32; set to `step` in the rows of the batch.
        step: number of this step; needed for `last`.
        sizes: of the programs; None for `block_sizes`.
    """
    if not runs.capacity:
        return
    dim = weights.shape[1]
    sizes = sizes or block_sizes(dim, runs.occurrences)
    clips = clip.granularity != "none"
    ratio, lowest = clip.row_bounds(width) if clips else (0.0, 0.0)
    _update_rows[(triton.cdiv(runs.capacity, sizes.rows),)](
        weights,
        exp_avg,
        exp_avg_sq,
        sums.grads,
        sums.squares,
        runs.capacity,
        runs.rows,
        runs.starts,
        runs.count,
        nonfinite,
        row_counts,
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
        COUNTS=row_counts is not None,
        MARKS=last is not None,
        CLIPPED=clipped,
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
            # Of an infinite norm times 0, which is no number, the maximum is the other one.
            threshold = tl.maximum(ratio * of_weights, lowest) * tl.maximum(times, 1).to(tl.float32)
            # The quotient is not taken where the norm is 0; there it would be 0 / 0 for a zero row.
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
