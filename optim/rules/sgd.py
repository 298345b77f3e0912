"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stampede.optim.rules.rule import RowGradientSquares, Rule


@dataclass(frozen=True)
class SGD(Rule):
    """`b = momentum*b + g; w = w - lr*b`, as torch's SGD; without momentum there is no state.

    Attributes:
        momentum: from 0 up to below 1.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum!r}; write a number from 0 up to below 1")

    @property
    def element_states(self) -> tuple[str, ...]:  # type: ignore[override]
        """The buffer, where there is momentum."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def moves_without_gradient(self) -> bool:  # type: ignore[override]
        """Momentum carries a row on."""
        return self.momentum > 0.0

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
        if self.momentum:
            grads = states["momentum_buffer"].mul_(self.momentum).add_(grads)
        weights.add_(grads, alpha=-lr)
