"""The step of rows that are not in the batch: momentum, L2 and decay, for every row."""

from __future__ import annotations

import torch
from torch import Tensor

from stampede.optim.row_values import RowValues
from stampede.optim.rules import Adam, adam_
from stampede.optim.table_array import TableArray

# Elements swept at a time: 4 MB per array keeps the zero gradient in cache.
SWEEP_ELEMENTS = 1 << 20


def sweep_(
    array: TableArray, values: RowValues | None, factor: Tensor | None, *, lr: float, step: int
) -> None:
    """One step of every row as if it were not in the batch, in place.

    Args:
        values: of all rows; None where the rule and the clip need none.
        factor: `[rows]` what the L2 term of the clipped columns is multiplied by; None for 1.
    """
    settings = array.settings
    element_wise = type(settings.rule) is Adam and factor is None and not array.is_rounded()
    # The fused kernel would take the L2 term of weights that have decayed already.
    if element_wise and not (settings.l2 and settings.weight_decay):
        _sweep_elements(array, settings.rule, lr, step)
        return
    block = max(1, SWEEP_ELEMENTS // array.weights.shape[1])
    for first in range(0, len(array.weights), block):
        rows = slice(first, first + block)
        _sweep_rows(
            array,
            rows,
            None if values is None else values[rows],
            None if factor is None else factor[rows],
            lr,
            step,
        )


def _sweep_elements(array: TableArray, rule: Adam, lr: float, step: int) -> None:
    """Adam's step where it is the same for every element: one fused pass, whatever the rows."""
    settings = array.settings
    weights, exp_avgs, exp_avg_sqs = (
        whole.view(-1).split(SWEEP_ELEMENTS)
        for whole in (array.weights, array.states["exp_avg"], array.states["exp_avg_sq"])
    )
    if settings.weight_decay:
        array.weights.mul_(1.0 - lr * settings.weight_decay)
    zero = torch.zeros_like(weights[0])
    adam_(
        weights,
        [zero[: len(part)] for part in weights],
        exp_avgs,
        exp_avg_sqs,
        step=step,
        lr=lr,
        betas=rule.betas,
        eps=rule.eps,
        eps_placement=rule.eps_placement,
        l2=settings.l2,
    )


def _sweep_rows(
    array: TableArray,
    rows: slice,
    values: RowValues | None,
    factor: Tensor | None,
    lr: float,
    step: int,
) -> None:
    settings = array.settings
    stored = array.weights[rows]
    weights = stored.float() if array.is_rounded() else stored
    grads = weights * (2.0 * settings.l2)
    if factor is not None:
        grads[:, : array.local_width].mul_(factor[:, None])
    states = {name: array.states[name][rows] for name in array.element_state_names}
    squares = None
    if array.row_state_names:
        states |= values.states(array)
        squares = values.after_clip(factor, array)
    if settings.weight_decay:
        weights.mul_(1.0 - lr * settings.weight_decay)
    settings.rule.step_(weights, grads, states, squares, lr=lr, step=step)
    for name in array.row_state_names:
        array.states[name][rows] = states[name]
    if array.is_rounded():
        ids = torch.arange(rows.start, rows.start + len(weights), device=weights.device)
        stored.copy_(array.rounded(weights, ids, step))
