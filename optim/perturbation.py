"""Helen's perturbation, and the settings of its step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stampede.optim.clip import CowClip
from stampede.optim.rules import Adam, check_betas, check_eps
from stampede.optim.settings import UpdateSettings

# Avoids 0/0 for a table without gradient; the repository's constant.
NORM_FLOOR = 1e-12


@dataclass(frozen=True)
class HelenSettings:
    """Settings of one parameter's step, apart from the learning rate. Hashable.

    Attributes:
        rho: length of the perturbation of a table whose rows all get the full factor.
        bound: smallest factor of a row, whatever its count; 1 perturbs all rows alike.
        betas: decay rates of Adam's two moments.
        eps: Adam's epsilon, added after the bias correction as in `torch.optim.Adam`.
        weight_decay: adds `weight_decay * w` to the gradient of the update only, with `w` before
            the perturbation.
        rows: `all`, every row takes a step (momentum and decay), as in the repository; `touched`,
            only the rows of the batch, an approximation: the others keep their momentum, and
            `l2` and `weight_decay` do not reach them.
        l2: coefficient of `||w||^2` in the loss, so that both gradients, and the norm and the
            perturbation, contain `2*l2*w`. Half of the repository's `embedding_regularizer`.
        columns: sharded tables: only the first `columns` columns of a row are perturbed and give
            its norms; the others, first-order weights, take the first gradient. None: all.
    """

    rho: float = 0.05
    bound: float = 0.3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    rows: Literal["all", "touched"] = "all"
    l2: float = 0.0
    columns: int | None = None

    def __post_init__(self) -> None:
        for name in ("rho", "weight_decay", "l2"):
            check_at_least_0(name, getattr(self, name))
        if not 0.0 <= self.bound <= 1.0:
            raise ValueError(f"Helen: bound is {self.bound!r}; write a number from 0 to 1")
        check_betas(self.betas)
        check_eps(self.eps)

    def second_pass(self) -> UpdateSettings:
        """The update with the second gradient: Adam with torch's epsilon, without a clip."""
        return UpdateSettings(
            rule=Adam(self.betas, self.eps, "torch"),
            clip=CowClip(granularity="none", columns=self.columns),
            # The update adds `2*l2*w`, Helen's weight decay is `weight_decay*w`.
            l2=self.l2 + self.weight_decay / 2.0,
            rows=self.rows,
        )

    def swept_decay_factor(self, grad_norms: Tensor) -> Tensor | None:
        """The factor of the L2 term of absent rows, which is taken at their perturbed place.

        Args:
            grad_norms: `[shards]` norm of the gradient of each shard's whole table.

        Returns:
            `[shards]`, see `PendingUpdate.swept_decay_factor`; None for 1.
        """
        if not self.l2 or self.rows == "touched":
            return None
        # Such a row has only the L2 gradient, so it would move by `stretch * w`.
        stretch = 2.0 * self.l2 * self.rho * self.bound / (grad_norms + NORM_FLOOR)
        decay = self.weight_decay + 2.0 * self.l2
        return (decay + 2.0 * self.l2 * stretch) / decay


def perturbation(
    grads: Tensor,
    counts: Tensor,
    grad_norm: Tensor,
    max_count: Tensor,
    rho: float,
    bound: float,
) -> Tensor:
    """How far the first pass moves each row of a table, or of a part of it.

    `e_i = rho * g_i / (||g|| + 1e-12) * max(c_i / max_j c_j, bound)`; `||g||` and `max_j` run over
    the whole table.

    Args:
        grads: `[n, dim]` gradients of the mean loss.
        counts: `[n]` int, how often each row occurs in the global batch.
    """
    # Half precision would turn 1e-12 into 0.
    dtype = torch.promote_types(grads.dtype, torch.float32)
    factors = (counts.to(dtype) / max_count.to(dtype).clamp(min=1)).clamp(min=bound)
    scale = rho / (grad_norm.to(dtype) + NORM_FLOOR)
    return (grads * (scale * factors).unsqueeze(1)).to(grads.dtype)


def check_at_least_0(name: str, value: float) -> None:
    """Refuse a setting that is negative or not finite."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"Helen: {name} is {value!r}; write a number of at least 0")
