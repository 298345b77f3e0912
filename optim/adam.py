"""One Adam step with the denominator's epsilon where Keras or where torch puts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

EpsPlacement = Literal["keras", "torch"]


def torch_eps(eps: float, eps_placement: EpsPlacement, beta2: float, step: int) -> float:
    """The epsilon that makes torch's Adam compute the chosen rule at `step`.

    Keras divides by `sqrt(v) + eps` before the bias correction, torch by
    `sqrt(v / (1 - beta2^t)) + eps` after it; the first is the second with
    `eps / sqrt(1 - beta2^t)`.

    Args:
        step: number of the step about to be taken, counted from 1.
    """
    if eps_placement == "torch":
        return eps
    return eps / math.sqrt(1.0 - beta2**step)


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    eps_placement: EpsPlacement,
    l2: float = 0.0,
) -> None:
    """One Adam step on lists of tensors, in place, in one fused pass over memory.

    `g = grad + 2*l2*w; m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g*g`, then with
    `keras` `w -= lr * sqrt(1-b2^t)/(1-b1^t) * m / (sqrt(v) + eps)`, with `torch` the epsilon
    added after the bias correction. Runs torch's own fused kernel, on CPU and CUDA.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: lists of equal length; the four tensors at one
            position have one shape, floating dtype and device.
        step: number of this step, counted from 1, the same for all.
        l2: coefficient of `||w||^2` in the loss.
    """
    if not params:
        return
    # The kernel reads the step on the device; filling it from the host needs no synchronisation.
    steps = torch.full((), float(step), dtype=torch.float32, device=params[0].device)
    torch._fused_adam_(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [steps] * len(params),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=2.0 * l2,
        eps=torch_eps(eps, eps_placement, betas[1], step),
        amsgrad=False,
        maximize=False,
    )
