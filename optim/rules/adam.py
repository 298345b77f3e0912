"""Adam, element-wise and row-wise, with epsilon where Keras or where torch puts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stampede.optim.rules.rule import RowGradientSquares, Rule, rest, spread

EpsPlacement = Literal["keras", "torch"]


@dataclass(frozen=True)
class Adam(Rule):
    """Adam: two moments per element.

    Attributes:
        betas: decay rates of the two moments.
        eps: added to the denominator, see `eps_placement`.
        eps_placement: see `adam_`.
    """

    element_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    moves_without_gradient: ClassVar[bool] = True

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-7
    eps_placement: EpsPlacement = "keras"

    def __post_init__(self) -> None:
        check_betas(self.betas)
        check_eps(self.eps)
        if self.eps_placement not in ("keras", "torch"):
            raise ValueError(f"eps_placement is {self.eps_placement!r}; write 'keras' or 'torch'")

    def step_(
        self,
        weights: Tensor,
        grads: Tensor,
        states: dict[str, Tensor],
        squares: RowGradientSquares | None,
        *,
        lr: float,
        step: int,
    ) -> None:
        """See `Rule.step_`; the formula is `adam_`'s."""
        adam_(
            [weights],
            [grads],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            step=step,
            lr=lr,
            betas=self.betas,
            eps=self.eps,
            eps_placement=self.eps_placement,
        )


@dataclass(frozen=True)
class RowWiseAdam(Adam):
    """Adam with one second moment per row: a third of the memory is saved.

    `v = b2*v + (1-b2)*mean(g*g)` over the clipped columns of the row, as FBGEMM's
    PARTIAL_ROWWISE_ADAM. The other columns share a second moment of their own, of the sum of their
    squares: with a single such column (a first-order weight) that is Adam.
    """

    element_states: ClassVar[tuple[str, ...]] = ("exp_avg",)
    row_states: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)

    def step_(
        self,
        weights: Tensor,
        grads: Tensor,
        states: dict[str, Tensor],
        squares: RowGradientSquares | None,
        *,
        lr: float,
        step: int,
    ) -> None:
        """See `Rule.step_`."""
        beta1, beta2 = self.betas
        exp_avg = states["exp_avg"].lerp_(grads, 1.0 - beta1)
        row, others = states["exp_avg_sq"], states.get(rest("exp_avg_sq"))
        row.mul_(beta2).add_(squares.embedding, alpha=(1.0 - beta2) / squares.width)
        if others is not None:
            others.mul_(beta2).add_(squares.rest, alpha=1.0 - beta2)
        correction = math.sqrt(1.0 - beta2**step)
        eps = torch_eps(self.eps, self.eps_placement, beta2, step)
        denominators = [
            None if values is None else values.sqrt().div_(correction).add_(eps)
            for values in (row, others)
        ]
        divisor = spread(*denominators, squares.local_width, weights.shape[1])
        weights.addcdiv_(exp_avg, divisor.expand_as(exp_avg), value=-lr / (1.0 - beta1**step))


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError unless `betas` are two decay rates."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas is {betas!r}; write two numbers from 0 up to below 1")


def check_eps(eps: float) -> None:
    """Raise ValueError unless `eps` is finite and above 0."""
    # With 0 a row that never had a gradient would be divided 0 by 0.
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps is {eps!r}; write a number above 0")


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


def step_constants(
    rule: Adam, lr: float, step: int, weight_decay: float = 0.0
) -> tuple[float, float, float]:
    """Adam's step as three numbers: `w = keep*w - alpha * m / (sqrt(v) + eps)`.

    Args:
        rule: its settings.
        lr: learning rate of the step.
        step: number of the step, counted from 1.
        weight_decay: decoupled decay.

    Returns:
        `alpha = lr * sqrt(1-b2^t) / (1-b1^t)`, `eps`, and `keep = 1 - lr*weight_decay`.
    """
    beta1, beta2 = rule.betas
    correction = math.sqrt(1.0 - beta2**step)
    eps = rule.eps if rule.eps_placement == "keras" else rule.eps * correction
    return lr * correction / (1.0 - beta1**step), eps, 1.0 - lr * weight_decay


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
    found_inf: Tensor | None = None,
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
        found_inf: `[1]` float32 on the device; nothing is changed if it is 1. None for 0.
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
        found_inf=found_inf,
    )
