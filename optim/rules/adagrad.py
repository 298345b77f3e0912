"""Adagrad, element-wise and row-wise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stampede.optim.rules.adam import check_eps
from stampede.optim.rules.rule import RowGradientSquares, Rule, rest, spread


@dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad: `s = s + g*g; w = w - lr * g / (sqrt(s) + eps)`, one sum per element.

    Attributes:
        eps: added to the denominator.
    """

    element_states: ClassVar[tuple[str, ...]] = ("sum",)

    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_eps(self.eps)

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
        total = states["sum"].addcmul_(grads, grads)
        weights.addcdiv_(grads, total.sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one sum per row, of the mean square over its clipped columns.

    As FBGEMM's EXACT_ROWWISE_ADAGRAD. The other columns share a sum of their own, of the sum of
    their squares: with a single such column (a first-order weight) that is Adagrad.
    """

    element_states: ClassVar[tuple[str, ...]] = ()
    row_states: ClassVar[tuple[str, ...]] = ("sum",)

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
        row, others = states["sum"], states.get(rest("sum"))
        row.add_(squares.embedding, alpha=1.0 / squares.width)
        if others is not None:
            others.add_(squares.rest)
        denominators = [
            None if values is None else values.sqrt().add_(self.eps) for values in (row, others)
        ]
        divisor = spread(*denominators, squares.local_width, weights.shape[1])
        weights.addcdiv_(grads, divisor.expand_as(grads), value=-lr)
