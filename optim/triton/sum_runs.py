"""The gradient of each distinct row: the sum of its occurrences, L2 term, squared norms.

One id may be in every sample, and one program must not add up half a million gradients. So aligned
windows of sorted occurrences of one row are summed separately. A run is then the sum of its head,
its windows and its tail, always in this order, so the bits never vary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stampede.optim.lookup import SortedRuns
from stampede.optim.table_array import TableArray
from stampede.optim.triton import RowSums, block_sizes


def sum_runs(runs: SortedRuns, grad: Tensor, array: TableArray, nonfinite: Tensor) -> RowSums:
    """Sum the gradient of a lookup by row, add `2*l2*w` and compute squared norms.

    Args:
        grad: `[n, dim]` float, contiguous rows, which `runs.source` picks from.
        nonfinite: `[1]` int32; the number of rows whose gradient norm is not finite is added to it.
    """
    weights, dim = array.weights, array.weights.shape[1]
    sizes = block_sizes(dim, runs.occurrences)
    grads = torch.empty(runs.capacity, dim, dtype=torch.float32, device=weights.device)
    squares = torch.empty(3, runs.capacity, dtype=torch.float32, device=weights.device)
    if not runs.capacity:
        return RowSums(grads, squares)
    _sum_runs[(triton.cdiv(runs.capacity, sizes.runs),)](
        *_source(runs, grad),
        runs.rows,
        runs.starts,
        runs.count,
        sum_windows(runs, grad)[1],
        weights,
        2.0 * array.settings.l2,
        grads,
        squares,
        runs.capacity,
        nonfinite,
        CLIPPED=array.local_width,
        RUNS=sizes.runs,
        UNROLL=sizes.unroll,
        WEIGHTED=runs.coefficient is not None,
        DIM=dim,
        COLUMNS=sizes.columns,
        WINDOW=sizes.window,
        num_warps=sizes.run_warps,
        enable_fp_fusion=False,
    )
    return RowSums(grads, squares)


def sum_windows(runs: SortedRuns, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of windows that hold one row, and, at a run's first window, of all its windows.

    Both are `[windows, dim]` float32, undefined elsewhere; see `sum_runs` for the arguments.
    """
    dim = grad.shape[1]
    sizes = block_sizes(dim, runs.occurrences)
    windows = runs.occurrences // sizes.window
    partials = torch.empty(windows, dim, dtype=torch.float32, device=grad.device)
    joined = torch.empty_like(partials)
    if windows:
        tile = {
            "DIM": dim,
            "COLUMNS": sizes.columns,
            "WINDOW": sizes.window,
            "TOGETHER": sizes.together,
            "num_warps": sizes.window_warps,
            "enable_fp_fusion": False,
        }
        weighted = runs.coefficient is not None
        _sum_windows[(windows,)](
            *_source(runs, grad), runs.ordered, partials, WEIGHTED=weighted, **tile
        )
        _join_windows[(windows,)](runs.ordered, partials, joined, windows, **tile)
    return partials, joined


def _source(runs: SortedRuns, grad: Tensor) -> tuple[Tensor, int, Tensor, Tensor | None]:
    return grad, grad.stride(0), runs.source, runs.coefficient


@triton.jit
def _sum_windows(
    grad,
    stride,
    source,
    coefficient,
    ordered,
    partials,
    WEIGHTED: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Sum a window of sorted occurrences, if all are of one row, into `partials[window]`."""
    window = tl.program_id(0).to(tl.int64)
    first = window * WINDOW
    if tl.load(ordered + first) == tl.load(ordered + first + WINDOW - 1):
        place = tl.arange(0, TOGETHER)
        column = tl.arange(0, COLUMNS)
        inside = column < DIM
        total = tl.zeros([TOGETHER, COLUMNS], tl.float32)
        for at in range(0, WINDOW, TOGETHER):
            occurrence = first + at + place
            start = tl.load(source + occurrence).to(tl.int64) * stride
            g = tl.load(grad + start[:, None] + column[None, :], mask=inside[None, :], other=0.0)
            g = g.to(tl.float32)
            if WEIGHTED:
                total = tl.fma(g, tl.load(coefficient + occurrence)[:, None], total)
            else:
                total += g
        tl.store(partials + window * DIM + column, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _join_windows(
    ordered,
    partials,
    joined,
    windows,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Add up the windows of a run into `joined[its first window]`."""
    window = tl.program_id(0).to(tl.int64)
    row = tl.load(ordered + window * WINDOW)
    is_whole = row == tl.load(ordered + window * WINDOW + WINDOW - 1)
    is_later = (window > 0) & (row == tl.load(ordered + tl.maximum(window - 1, 0) * WINDOW))
    if is_whole & (is_later == 0):
        place = tl.arange(0, TOGETHER)
        column = tl.arange(0, COLUMNS)
        inside = column < DIM
        total = tl.zeros([TOGETHER, COLUMNS], tl.float32)
        at = window
        more = 1
        while more > 0:
            other = at + place
            last = tl.load(ordered + other * WINDOW + WINDOW - 1, mask=other < windows, other=-1)
            mine = last == row
            total += tl.load(
                partials + other[:, None] * DIM + column[None, :],
                mask=mine[:, None] & inside[None, :],
                other=0.0,
            )
            at += TOGETHER
            more = tl.sum(mine.to(tl.int32), axis=0) // TOGETHER
        tl.store(joined + window * DIM + column, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _add_stretches(
    total,
    grad,
    stride,
    source,
    coefficient,
    start,
    stop,
    column,
    inside,
    WEIGHTED: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Add occurrences `start` up to `stop` to each row of `total`, one after the other."""
    longest = tl.max(stop - start, axis=0)
    for at in range(0, longest, UNROLL):
        for ahead in tl.static_range(UNROLL):
            occurrence = start + at + ahead
            here = occurrence < stop
            begin = tl.load(source + occurrence, mask=here, other=0).to(tl.int64) * stride
            g = tl.load(
                grad + begin[:, None] + column[None, :],
                mask=here[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
            if WEIGHTED:
                factor = tl.load(coefficient + occurrence, mask=here, other=0.0)
                total = tl.fma(g, factor[:, None], total)
            else:
                total += g
    return total


@triton.jit
def _sum_runs(
    grad,
    stride,
    source,
    coefficient,
    rows,
    starts,
    count,
    joined,
    weights,
    decay,
    grads,
    squares,
    capacity,
    nonfinite,
    CLIPPED: tl.constexpr,
    RUNS: tl.constexpr,
    UNROLL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Sum the gradients of some rows, add their decay and compute squared norms."""
    first = tl.program_id(0).to(tl.int64) * RUNS
    number = tl.load(count)
    if first < number:
        run = first + tl.arange(0, RUNS)
        column = tl.arange(0, COLUMNS)
        inside = column < DIM
        here = run < number
        start = tl.load(starts + run, mask=here, other=0)
        stop = tl.load(starts + run + 1, mask=here, other=0)
        first_window = (start + WINDOW - 1) // WINDOW
        stop_window = stop // WINDOW
        is_long = stop_window > first_window

        total = tl.zeros([RUNS, COLUMNS], tl.float32)
        head = tl.where(is_long, first_window * WINDOW, stop)
        total = _add_stretches(
            total, grad, stride, source, coefficient, start, head, column, inside, WEIGHTED, UNROLL
        )
        total += tl.load(
            joined + first_window.to(tl.int64)[:, None] * DIM + column[None, :],
            mask=is_long[:, None] & inside[None, :],
            other=0.0,
        )
        tail = tl.where(is_long, stop_window * WINDOW, stop)
        total = _add_stretches(
            total, grad, stride, source, coefficient, tail, stop, column, inside, WEIGHTED, UNROLL
        )

        row = tl.load(rows + run, mask=here, other=0)
        mask = here[:, None] & inside[None, :]
        w = tl.load(weights + row[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        g = tl.fma(w, decay, total)
        tl.store(grads + run[:, None] * DIM + column[None, :], g, mask=mask)
        is_clipped = (column < CLIPPED)[None, :]
        of_grad = tl.sum(tl.where(is_clipped, g * g, 0.0), axis=1)
        of_rest = tl.sum(tl.where(is_clipped, 0.0, g * g), axis=1)
        of_weights = tl.sum(tl.where(is_clipped, w * w, 0.0), axis=1)
        tl.store(squares + run, of_grad, mask=here)
        tl.store(squares + capacity + run, of_rest, mask=here)
        tl.store(squares + 2 * capacity + run, of_weights, mask=here)
        # A comparison with NaN is false.
        is_finite = of_grad + of_rest < float("inf")
        bad = tl.sum((here & (is_finite == 0)).to(tl.int32), axis=0)
        if bad > 0:
            tl.atomic_add(nonfinite, bad)
