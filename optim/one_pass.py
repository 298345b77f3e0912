"""L2, clip and step of a batch's rows in one pass, where a row needs nothing but itself."""

from __future__ import annotations

import torch

from stampede.optim.missed_steps import steps_by_kernel, take_step_
from stampede.optim.native import kernels
from stampede.optim.reduction import PendingUpdate


def is_one_pass(update: PendingUpdate) -> bool:
    """Whether the C++ kernel does all of an update. It changes nothing by itself.

    Gradients that are not finite are left to the passes that tell which rows they are of.
    """
    array, (rows, grads, _) = update.array, update.batch
    settings = array.settings
    alone = not (array.is_split or settings.clip.by_table or settings.needs_all_rows)
    return (
        alone
        and steps_by_kernel(array)
        and grads.dtype == torch.float32
        and grads.is_contiguous()
        and kernels.are_finite(array.weights, rows, grads, settings.l2)
    )


def step_in_one_pass_(update: PendingUpdate) -> int:
    """The step of an array for which `is_one_pass` is true; returns how many rows were clipped."""
    array, (rows, grads, counts) = update.array, update.batch
    settings = array.settings
    is_clipped = settings.clip.by_row
    return take_step_(
        array,
        update.lr,
        update.step,
        len(rows),
        lambda constants, last, step: kernels.clip_and_step_rows_(
            *array.adam_tensors(),
            rows,
            grads,
            counts,
            array.local_width if is_clipped else 0,
            settings.clip.row_bounds(array.width) if is_clipped else (0.0, 0.0),
            settings.l2,
            constants,
            settings.rule.betas,
            last,
            step,
        ),
    )
