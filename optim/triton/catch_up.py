"""Adam steps that rows have missed, replayed when the rows are needed.

Under `rows="all"` a row that no batch holds still takes a step each time: its moments decay, and
`2*l2*w` is its gradient. Such a step depends on the row alone, so it can wait. Steps are replayed
in order by the function that the update itself takes: many at once or one by one, the bits are the
same. A missed step is not clipped; where it could be (`CowClip.may_clip_decay`), do not defer it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stampede.optim.triton.adam import adam_step
from stampede.optim.triton.block_sizes import BlockSizes, block_sizes, check_dim


def catch_up_range_(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    last: Tensor,
    first_row: int,
    stop_row: int,
    steps: Tensor,
    first_step: int,
    now: int,
    betas: tuple[float, float],
    l2: float,
    sizes: BlockSizes | None = None,
    nonfinite: Tensor | None = None,
) -> None:
    """Bring rows `first_row` up to `stop_row` to step `now`, in place.

    Args:
        weights, exp_avg, exp_avg_sq: `[rows, dim]` float32, contiguous.
        last: `[rows]` int32, the step each row is at, none before `first_step`; becomes `now`.
        first_row, stop_row: the rows.
        steps: `[window, 3]` float32, contiguous: alpha, eps and keep of each step after
            `first_step`, see `stampede.optim.rules.step_constants`.
        first_step: the step before that of `steps[0]`.
        now: the step to bring them to.
        betas: decay rates of the moments.
        l2: coefficient of `||w||^2` in the loss.
        sizes: of the programs; None for `block_sizes`.
        nonfinite: `[1]` int32; unless it is 0 nothing is written. None for 0.

    Raises:
        ValueError: the rows do not exist, or `steps` does not reach up to `now`.
    """
    if not 0 <= first_row <= stop_row <= len(weights):
        raise ValueError(
            f"rows {first_row} to {stop_row} of a table of {len(weights)}; give a range inside it"
        )
    _catch_up_(
        (weights, exp_avg, exp_avg_sq, last),
        (None, None, first_row, stop_row - first_row),
        (steps, first_step, now),
        betas,
        l2,
        nonfinite,
        sizes,
    )
    # Afterwards: a row's columns are brought up to date by several programs, which all read it.
    reached = now if nonfinite is None else torch.where(nonfinite == 0, now, 0).to(last.dtype)
    last[first_row:stop_row].clamp_(min=reached)


def catch_up_rows_(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    last: Tensor,
    rows: Tensor,
    count: Tensor,
    steps: Tensor,
    first_step: int,
    now: int,
    betas: tuple[float, float],
    l2: float,
    sizes: BlockSizes | None = None,
    nonfinite: Tensor | None = None,
) -> None:
    """Bring the rows of a batch to step `now`, in place.

    Args:
        rows: `[capacity]` int64 distinct rows, see `SortedRuns`.
        count: `[1]` int32, how many of them there are.
        weights, exp_avg, exp_avg_sq, last, steps, first_step, now, betas, l2, sizes, nonfinite:
            see `catch_up_range_`.
    """
    capacity = rows.numel()
    _catch_up_(
        (weights, exp_avg, exp_avg_sq, last),
        (rows, count, 0, capacity),
        (steps, first_step, now),
        betas,
        l2,
        nonfinite,
        sizes,
    )
    if capacity:
        block = 256
        _mark_rows[(triton.cdiv(capacity, block),)](
            last, rows, count, now, nonfinite, GUARDED=nonfinite is not None, BLOCK=block
        )


def _catch_up_(
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    which: tuple[Tensor | None, Tensor | None, int, int],
    schedule: tuple[Tensor, int, int],
    betas: tuple[float, float],
    l2: float,
    nonfinite: Tensor | None,
    sizes: BlockSizes | None,
) -> None:
    weights, _, _, last = state
    steps, first_step, now = schedule
    dim = weights.shape[1]
    check_dim(dim)
    if last.dtype != torch.int32:
        raise ValueError(f"last has dtype {last.dtype}; give int32")
    if steps.dtype != torch.float32 or steps.shape[1:] != (3,) or not steps.is_contiguous():
        raise ValueError(
            f"steps has shape {tuple(steps.shape)} and dtype {steps.dtype}; give contiguous "
            "float32 [window, 3]"
        )
    if now - first_step > len(steps):
        raise ValueError(
            f"steps holds {len(steps)} steps after step {first_step}, which do not reach {now}"
        )
    sizes = sizes or block_sizes(dim, which[3])
    programs = triton.cdiv(which[3] * dim, sizes.elements)
    if not programs or now <= first_step:
        return
    _replay[(programs,)](
        *state,
        *which,
        *schedule,
        2.0 * l2,
        float(betas[0]),
        1.0 - betas[0],
        float(betas[1]),
        1.0 - betas[1],
        nonfinite,
        LISTED=which[0] is not None,
        GUARDED=nonfinite is not None,
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
    GUARDED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Replay the missed steps of some elements; those of neighbouring rows may differ in number."""
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
    if GUARDED:
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
def _mark_rows(
    last, rows, count, now, nonfinite, GUARDED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Note that rows are at step `now`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = place < tl.load(count)
    row = tl.load(rows + place, mask=here, other=0)
    since = tl.load(last + row, mask=here, other=now)
    reached = tl.zeros([BLOCK], tl.int32) + now
    if GUARDED:
        reached = tl.where(tl.load(nonfinite) == 0, reached, 0)
    tl.store(last + row, reached, mask=here & (since < reached))
