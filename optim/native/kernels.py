"""Calls of the C++ kernels, with shapes and dtypes; formulas are in the C++ files."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_ROWS_A_WORD = 64
_ROWS_A_SUMMARY = 64 * _ROWS_A_WORD

# Each thread's own memory, as backward passes of several models may run at once.
_local = threading.local()


def is_sound(ids: Tensor, offsets: Tensor, first_rows: Tensor, rows: int) -> bool:
    """Whether the bags of a lookup follow each other from its first id to its last, and each id is
    inside its table.

    Args:
        ids, offsets, first_rows, rows: see `sum_lookup`; of any values.
    """
    return torch.ops.stampede.is_sound(ids, offsets, first_rows, rows)


def pool_rows_(
    rows: Tensor,
    ids: Tensor,
    offsets: Tensor,
    first_rows: Tensor,
    output: Tensor,
    *,
    mean: bool = False,
    weights: Tensor | None = None,
) -> None:
    """Pool the rows of a lookup; an id outside its table stands for the first row.

    Args:
        rows: `[all rows, dim]` float32.
        ids, offsets, first_rows, mean, weights: see `sum_lookup`.
        output: `[batch, features * dim]` float32, with contiguous rows; is written.
    """
    torch.ops.stampede.pool_rows_(rows, ids, offsets, first_rows, mean, weights, output)


def sum_lookup(
    ids: Tensor,
    offsets: Tensor,
    first_rows: Tensor,
    rows: int,
    grad: Tensor,
    dim: int,
    *,
    pooled: bool,
    mean: bool = False,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the gradient of a lookup's output by row.

    Args:
        ids: `[n]` int32 or int64, within their tables.
        offsets: `[features * batch + 1]` where each bag begins among `ids`, counted from any
            number, and one past the last; empty if there is one feature with an id a bag.
        first_rows: `[features]` int64, where each feature's table begins; ascending.
        rows: of all tables together.
        grad: `[batch, features * dim]` float32 of the pooled output, or `[n, dim]` of a sequence.
        dim: columns of a row.
        pooled: which of the two `grad` is.
        mean: whether the pooled output is the mean over a bag.
        weights: `[n]` float32, of each id.

    Returns:
        The three parts of `stampede.optim.rows.RowGradients`.

    Raises:
        IndexError: an id lies outside its table.
    """
    marks, before = _workspace(rows)
    # Columns of a wider gradient are read where they are; other layouts are copied.
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    return torch.ops.stampede.sum_by_row(
        ids, offsets, first_rows, rows, grad, dim, pooled, mean, weights, marks, before
    )


def measure_rows(
    weights: Tensor, rows: Tensor, grads: Tensor, clipped: int, l2: float
) -> tuple[Tensor, Tensor]:
    """Gradients of rows with their L2 term, and squared norms.

    Args:
        weights: `[all rows, dim]` float32.
        rows: `[n]` int64.
        grads: `[n, dim]` float32.
        clipped: number of clipped columns, the first ones.

    Returns:
        `[n, dim]` gradients, and `[3, n]`: squared norm of the gradient over the clipped columns,
        over the others, of the weights over the clipped columns.
    """
    return torch.ops.stampede.measure_rows(weights, rows, grads, clipped, l2)


def adam_rows_(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grads: Tensor,
    factor: Tensor | None,
    clipped: int,
    constants: Tensor,
    betas: tuple[float, float],
    last: Tensor | None,
    step: int,
) -> None:
    """One Adam step of the rows of a batch, in place.

    Args:
        weights, exp_avg, exp_avg_sq: `[all rows, dim]` float32.
        rows: `[n]` int64, distinct.
        grads: `[n, dim]` float32, L2 included.
        factor: `[n]` what the clipped columns are multiplied by; None for 1.
        clipped: number of clipped columns, the first ones.
        constants: `[1, 3]` float32, see `stampede.optim.rules.step_constants`.
        last: `[all rows]` int32, the steps that rows are at; set to `step`.
    """
    torch.ops.stampede.adam_rows_(
        weights, exp_avg, exp_avg_sq, rows, grads, factor, clipped, constants, *betas, last, step
    )


def are_finite(weights: Tensor, rows: Tensor, grads: Tensor, l2: float) -> bool:
    """Whether the squared norm of the gradient of each row, with its L2 term, is finite.

    Args:
        weights, rows, grads, l2: see `measure_rows`.
    """
    return torch.ops.stampede.are_finite(weights, rows, grads, l2)


def clip_and_step_rows_(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grads: Tensor,
    counts: Tensor,
    clipped: int,
    bounds: tuple[float, float],
    l2: float,
    constants: Tensor,
    betas: tuple[float, float],
    last: Tensor | None,
    step: int,
) -> int:
    """L2, clip and Adam step of the rows of a batch, in place and in one pass over them.

    Args:
        weights, exp_avg, exp_avg_sq, rows, constants, last, step: see `adam_rows_`.
        grads: `[n, dim]` float32 without the L2 term; with it `are_finite`.
        counts: `[n]` int64 occurrences of each row.
        clipped: number of clipped columns, the first ones; 0 for no clip.
        bounds: see `CowClip.row_bounds`.

    Returns:
        How many rows were clipped.
    """
    return torch.ops.stampede.clip_and_step_rows_(
        weights,
        exp_avg,
        exp_avg_sq,
        rows,
        grads,
        counts,
        clipped,
        *bounds,
        l2,
        constants,
        *betas,
        last,
        step,
    )


def catch_up_range_(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    last: Tensor,
    rows: range,
    steps: Tensor,
    first: int,
    step: int,
    betas: tuple[float, float],
    l2: float,
) -> None:
    """Replay what rows have missed up to `step`, in place.

    Args:
        weights, exp_avg, exp_avg_sq: `[all rows, dim]` float32.
        last: `[all rows]` int32, the steps that rows are at, none of them before `first`.
        rows: neighbouring rows.
        steps: `[step - first or more, 3]` float32, the constants of the steps after `first`.
    """
    torch.ops.stampede.catch_up_range_(
        weights, exp_avg, exp_avg_sq, last, rows.start, rows.stop, steps, first, step, *betas, l2
    )


def catch_up_lookup_(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    last: Tensor,
    ids: Tensor,
    offsets: Tensor,
    first_rows: Tensor,
    steps: Tensor,
    first: int,
    step: int,
    betas: tuple[float, float],
    l2: float,
) -> None:
    """Replay what the rows of a lookup have missed; see `catch_up_range_` and `sum_lookup`."""
    torch.ops.stampede.catch_up_lookup_(
        weights,
        exp_avg,
        exp_avg_sq,
        last,
        ids,
        offsets,
        first_rows,
        steps,
        first,
        step,
        *betas,
        l2,
    )


def _workspace(rows: int) -> tuple[Tensor, Tensor]:
    """Zeros for the marks of rows, and memory for a number a word of marks."""
    summaries = -(-rows // _ROWS_A_SUMMARY)
    found = getattr(_local, "workspace", None)
    if found is None or len(found[1]) < summaries * _ROWS_A_WORD:
        found = (
            torch.zeros(summaries * (_ROWS_A_WORD + 1), dtype=torch.int64),
            torch.empty(summaries * _ROWS_A_WORD, dtype=torch.int32),
        )
        _local.workspace = found
    return found
