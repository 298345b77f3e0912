"""The update of a table from the gradients of a batch's rows: L2, clip, Adam."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from stampede.optim.adam import EpsPlacement, adam_
from stampede.optim.clip import CowClip, clip_rows_
from stampede.optim.rows import RowGradients

Rows = Literal["all", "touched"]

# Elements swept at a time: 4 MB per array keeps the zero gradient in cache.
SWEEP_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class UpdateSettings:
    """What one table's update does, apart from the learning rate. Hashable.

    Attributes:
        betas: decay rates of Adam's two moments.
        eps: Adam's epsilon, see `eps_placement`.
        l2: coefficient of `||w||^2` in the loss; adds `2*l2*w` to the gradient, inside the clip.
        clip: the clipping rule, or `None` for no clipping.
        rows: `all`, every row takes a step (momentum decay and L2), or `touched`, only the rows
            of the batch.
        eps_placement: see `stampede.optim.adam`.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-7
    l2: float = 0.0
    clip: CowClip | None = field(default_factory=CowClip)
    rows: Rows = "all"
    eps_placement: EpsPlacement = "keras"

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(
                f"CowClipAdam: betas is {self.betas!r}; write two numbers from 0 up to below 1"
            )
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise ValueError(f"CowClipAdam: l2 is {self.l2!r}; write a number of at least 0")
        # With 0 a row that never had a gradient would be divided 0 by 0.
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"CowClipAdam: eps is {self.eps!r}; write a number above 0")
        if self.rows not in ("all", "touched"):
            raise ValueError(f"CowClipAdam: rows is {self.rows!r}; write 'all' or 'touched'")
        if self.eps_placement not in ("keras", "torch"):
            raise ValueError(
                f"CowClipAdam: eps_placement is {self.eps_placement!r}; write 'keras' or 'torch'"
            )
        if not (self.clip is None or isinstance(self.clip, CowClip)):
            raise ValueError(f"CowClipAdam: clip is {self.clip!r}; write CowClip(...) or None")

    @property
    def decay_may_be_clipped(self) -> bool:
        """Whether the L2 term alone can exceed a row's threshold (only if `2*l2 > ratio`)."""
        return self.clip is not None and 2.0 * self.l2 > self.clip.ratio


@dataclass
class TableState:
    """A table, or several of one width in one array, with Adam's moments.

    Attributes:
        weights: `[rows, dim]`, contiguous; changed in place by `update_`.
        exp_avg: `[rows, dim]` first moment.
        exp_avg_sq: `[rows, dim]` second moment.
    """

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three arrays, in the order above."""
        return self.weights, self.exp_avg, self.exp_avg_sq


@torch.no_grad()
def update_(
    table: TableState, batch: RowGradients, settings: UpdateSettings, *, lr: float, step: int
) -> Tensor:
    """One step of the whole table, in place.

    No gradient of the table's size is made: the batch's rows are taken out, updated with their
    gradients and put back over the sweep of all the others.

    Args:
        table: weights and moments.
        batch: gradients of the mean loss over the global batch.
        settings: the rule.
        lr: learning rate of this step.
        step: number of this step, counted from 1.

    Returns:
        int64 scalar tensor: how many of the batch's rows were clipped.
    """
    picked = TableState(*(array[batch.rows] for array in table.arrays()))
    clipped = _step(picked, batch.grads, batch.counts, settings, lr, step)
    if settings.rows == "all":
        _sweep(table, settings, lr, step)
    for array, values in zip(table.arrays(), picked.arrays(), strict=True):
        array.index_copy_(0, batch.rows, values)
    return clipped


def _step(
    part: TableState,
    grads: Tensor,
    counts: Tensor,
    settings: UpdateSettings,
    lr: float,
    step: int,
) -> Tensor:
    """L2, clip and Adam on every row of `part`, in place; returns how many rows were clipped."""
    grads = torch.add(grads, part.weights, alpha=2.0 * settings.l2)
    if settings.clip is None:
        clipped = torch.zeros((), dtype=torch.int64, device=grads.device)
    else:
        clipped = clip_rows_(grads, part.weights, counts, settings.clip).sum()
    adam_(
        [part.weights],
        [grads],
        [part.exp_avg],
        [part.exp_avg_sq],
        step=step,
        lr=lr,
        betas=settings.betas,
        eps=settings.eps,
        eps_placement=settings.eps_placement,
    )
    return clipped


def _sweep(table: TableState, settings: UpdateSettings, lr: float, step: int) -> None:
    """The step of rows without gradient (moments decay, L2), for every row, block by block."""
    if settings.decay_may_be_clipped:
        block = max(1, SWEEP_ELEMENTS // table.weights.shape[1])
        for parts in zip(*(array.split(block) for array in table.arrays()), strict=True):
            part = TableState(*parts)
            counts = torch.ones(len(part.weights), dtype=torch.int64, device=part.weights.device)
            _step(part, torch.zeros_like(part.weights), counts, settings, lr, step)
        return
    # Below its threshold a row's step is element-wise: one fused pass, whatever the rows are.
    weights, exp_avgs, exp_avg_sqs = (
        array.view(-1).split(SWEEP_ELEMENTS) for array in table.arrays()
    )
    zero = torch.zeros_like(weights[0])
    adam_(
        weights,
        [zero[: len(part)] for part in weights],
        exp_avgs,
        exp_avg_sqs,
        step=step,
        lr=lr,
        betas=settings.betas,
        eps=settings.eps,
        eps_placement=settings.eps_placement,
        l2=settings.l2,
    )
