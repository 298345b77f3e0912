"""What Helen's two passes do to one parameter, as rows of a table, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stampede.optim.helen.perturbation import HelenSettings, perturbation
from stampede.optim.occurrences import ids_behind
from stampede.optim.reduction import PendingUpdate
from stampede.optim.row_gradients import row_gradients
from stampede.optim.rows import RowGradients
from stampede.optim.rules.adam import adam_
from stampede.optim.settings import UpdateSettings
from stampede.optim.update import update_

# Its rows have thresholds of their own, so that the counts are read.
_COUNTED = UpdateSettings()


@dataclass
class First:
    """What the first pass leaves of one parameter for the second.

    Attributes:
        batch: the gradient to update with, if that is the first pass's.
        rows: `[n]` rows that moved, or None if none did.
        weights: `[n, dim]` where they were.
        decay_factor: see `HelenSettings.swept_decay_factor`. The perturbation of rows outside the
            batch is not carried out: no lookup reads them.
    """

    batch: RowGradients | None = None
    rows: Tensor | None = None
    weights: Tensor | None = None
    decay_factor: Tensor | None = None


def as_table(array: Tensor) -> Tensor:
    """A parameter of any shape as `[rows, dim]`, sharing its memory."""
    return array.view(len(array), -1) if array.dim() else array.view(1, 1)


def gradient(
    param: Tensor, settings: HelenSettings, frozen_row: int | None, *, counted: bool
) -> RowGradients:
    """The gradient without the L2 term and without the row that never changes.

    Args:
        counted: whether it must tell how often each id occurred; else, of a dense gradient, every
            row counts as seen once.

    Raises:
        ValueError: it does not tell.
    """
    grad, name = param.grad, f"the gradient of a parameter of shape {tuple(param.shape)}"
    if grad.layout == torch.strided:
        if counted:
            raise ValueError(
                f"Helen: {name} is dense and does not tell how often each id occurred; build the "
                "table with sparse=True, or put the parameter into a group of kind 'dense'"
            )
        rows = torch.arange(len(as_table(param)), device=grad.device)
        # A copy, because the second backward may write over the first one's gradient.
        grads = grad.reshape(as_table(param).shape).clone()
        batch = RowGradients(rows, grads, torch.ones_like(rows))
    else:
        if counted and ids_behind(param) is None:
            raise ValueError(
                f"Helen: {name} is coalesced, so the counts of its ids are lost; usual causes are "
                "grad.coalesce(), DistributedDataParallel and the unscaling of a GradScaler"
            )
        batch = row_gradients(param, _COUNTED if counted else settings.second_pass(), None)
    if frozen_row is None:
        return batch
    return RowGradients(*(part[batch.rows != frozen_row] for part in batch))


def with_l2(table: Tensor, batch: RowGradients, l2: float) -> RowGradients:
    """The gradient with its L2 term."""
    if not l2:
        return batch
    return batch._replace(grads=torch.add(batch.grads, table[batch.rows], alpha=2.0 * l2))


def gradient_norm(
    table: Tensor, batch: RowGradients, settings: HelenSettings, frozen_row: int | None
) -> Tensor:
    """Norm of the gradient of the whole table, with the L2 term of rows outside the batch."""
    norm = torch.linalg.vector_norm(batch.grads)
    if settings.l2 == 0.0 or settings.rows == "touched" or len(batch.rows) == len(table):
        return norm
    inside = table[batch.rows].square().sum()
    if frozen_row is not None:
        inside = inside + table[frozen_row].square().sum()
    outside = (table.square().sum() - inside).clamp(min=0.0)
    return torch.sqrt(norm.square() + outside * (2.0 * settings.l2) ** 2)


def dense_norms(
    norms: dict[Tensor, Tensor], groups: dict[Tensor, dict[str, Any]]
) -> dict[str, Tensor]:
    """The norms that a dense parameter's perturbation may be divided by, see `Helen`."""
    if not norms:
        return {}
    device = next(iter(norms)).device
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms.values()]))
    tables = [norms[param] for param in norms if groups[param]["kind"] == "embedding"]
    return {"all": total, "last_table": tables[-1] if tables else total}


def move_(
    table: Tensor, batch: RowGradients, norm: Tensor, bound: float, settings: HelenSettings
) -> First:
    """Perturb the rows of the batch, in place; their gradients have their L2 term."""
    weights = table[batch.rows]
    if len(batch.rows):
        max_count = batch.counts.max()
        moved = perturbation(batch.grads, batch.counts, norm, max_count, settings.rho, bound)
        table.index_copy_(0, batch.rows, (weights + moved).to(table.dtype))
    return First(None, batch.rows, weights, settings.swept_decay_factor(norm[None], bound))


def update_all_(updates: Sequence[PendingUpdate], dense: Sequence[bool]) -> None:
    """Take the steps, in place; a gradient that is refused changes nothing on its device.

    Args:
        dense: of each, whether it is not a table but a dense parameter.
    """
    by_device: dict[torch.device, list[PendingUpdate]] = {}
    whole = []
    for update, is_dense in zip(updates, dense, strict=True):
        array = update.array
        if is_dense and len(update.batch.rows) == len(array.weights) and not array.is_rounded():
            whole.append(update)
        else:
            by_device.setdefault(array.weights.device, []).append(update)
    for tables in by_device.values():
        update_(tables)
    for update in whole:
        array, rule = update.array, update.array.settings.rule
        adam_(
            [array.weights],
            [update.batch.grads],
            [array.states["exp_avg"]],
            [array.states["exp_avg_sq"]],
            step=update.step,
            lr=update.lr,
            betas=rule.betas,
            eps=rule.eps,
            eps_placement=rule.eps_placement,
            l2=array.settings.l2,
        )
