# pyright: basic
"""The base optimizers under the clip: how a row moves, given its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, SupportsFloat

if TYPE_CHECKING:
    # A configuration has the settings of rules without importing torch.
    from torch import Tensor

EpsPlacement = Literal["keras", "torch"]


class RowGradientSquares(NamedTuple):
    """Squared gradient norms of rows, over the table's columns in all shards.

    Row-wise optimizers keep one value for the clipped columns, `[n]` `embedding`, and one for the
    `rest`. `width` counts the clipped columns of the whole table, `local_width` this shard's first.
    """

    embedding: Tensor
    rest: Tensor
    width: int
    local_width: int


class RowStep(NamedTuple):
    """Rows that will take a step, counted from 1.

    If a table is split by columns, they are parts of rows: what depends on a whole row must come
    from `counts`, `squares` and row states.
    """

    weights: Tensor  # `[n, dim]` float, to be changed in place.
    grads: Tensor  # `[n, dim]` gradients after L2 and clip; may be overwritten.
    counts: Tensor  # `[n]` int64, how often each occurs in the global batch; 0 outside of it.
    states: dict[str, Tensor]  # The rows' states by name, changed in place.
    squares: RowGradientSquares | None  # Of `grads`; given if the rule has row states.
    lr: float
    step: int

    def row_divisor(
        self, state: str, kept: float, share: float, correction: float, eps: float
    ) -> Tensor:
        """Update a row state by the mean square of each row's gradient; what to divide a step by.

        `state = kept * state + share * mean`; returns `sqrt(state) / correction + eps`, shaped like
        the weights.
        """
        squares, weights = self.squares, self.weights
        assert squares is not None, "only for rules with row states"
        totals = {state: (squares.embedding, share / squares.width)}
        if f"{state}_rest" in self.states:
            totals[f"{state}_rest"] = squares.rest, share
        divisors = []
        for name, (total, factor) in totals.items():
            values = self.states[name].mul_(kept).add_(total, alpha=factor)
            divisors.append(values.sqrt().div_(correction).add_(eps)[:, None])
        if len(divisors) == 1:
            return divisors[0].expand_as(weights)
        import torch

        widths = squares.local_width, weights.shape[1] - squares.local_width
        parts = [one.expand(-1, width) for one, width in zip(divisors, widths, strict=True)]
        return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Rule:
    """A base optimizer: its settings, the state it keeps and its step. Hashable.

    The settings are the fields of a frozen dataclass, with defaults. Its docstring describes them
    under `Args:`, and `__post_init__` raises ValueError for a wrong one. The arguments of an
    optimizer and the keys of a configuration are made from them.
    """

    # Names of the states shaped like the weights, `[rows, dim]` float32.
    element_states: ClassVar[tuple[str, ...]] = ()
    # Names of the states with one value a row, `[rows]` float32. Each has a twin `<name>_rest` for
    # the columns that are not clipped, if there are such columns.
    row_states: ClassVar[tuple[str, ...]] = ()
    # Whether a row with a zero gradient moves (momentum).
    moves_without_gradient: ClassVar[bool] = False
    # Whether no row ever moves.
    is_frozen: ClassVar[bool] = False

    def step_(self, rows: RowStep) -> None:
        """Move rows, in place."""
        raise NotImplementedError

    def state_shapes(self, rows: int, dim: int, has_rest: bool) -> dict[str, tuple[int, ...]]:
        """Shape of every state, by name; `has_rest`: some columns of the table are not clipped."""
        shapes: dict[str, tuple[int, ...]] = {name: (rows, dim) for name in self.element_states}
        for name in self.row_states:
            shapes |= {name: (rows,)} | ({f"{name}_rest": (rows,)} if has_rest else {})
        return shapes


@dataclass(frozen=True)
class Adam(Rule):
    """Adam: two moments per element; see `update_`.

    Args:
        betas: decay rates of the two moments, in [0, 1).
        eps: Adam's epsilon, above 0.
        eps_placement: epsilon before (keras, the authors' code) or after (torch) the bias
            correction.
    """

    element_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    moves_without_gradient: ClassVar[bool] = True

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-7
    eps_placement: EpsPlacement = "keras"

    def __post_init__(self) -> None:
        is_pair = isinstance(self.betas, tuple) and len(self.betas) == 2
        is_number = is_pair and all(_is_number(beta) for beta in self.betas)
        if not (is_number and all(0.0 <= beta < 1.0 for beta in self.betas)):
            raise ValueError(
                f"betas is {self.betas!r}; write two numbers in [0, 1), such as (0.9, 0.999)"
            )
        # 0 would divide 0 by 0 for a row that never had a gradient.
        check_number("eps", self.eps, "above 0")
        if self.eps_placement not in ("keras", "torch"):
            raise ValueError(f"eps_placement is {self.eps_placement!r}; write 'keras' or 'torch'")

    def step_(self, rows: RowStep) -> None:
        """See `Rule.step_`."""
        moments = [rows.states["exp_avg"]], [rows.states["exp_avg_sq"]]
        self.update_([rows.weights], [rows.grads], *moments, rows.lr, rows.step)

    def update_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        lr: float,
        step: int,
        *,
        l2: float = 0.0,
        found_inf: Tensor | None = None,
    ) -> None:
        """One step on lists of tensors, in place, in one fused pass over memory.

        `g = grad + 2*l2*w; m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g*g`, then with
        `keras` `w -= lr * sqrt(1-b2^t)/(1-b1^t) * m / (sqrt(v) + eps)`, with `torch` the epsilon
        added after the bias correction. Runs torch's own fused kernel, on CPU and CUDA.

        Args:
            step: number of this step, counted from 1, the same for all.
            found_inf: `[1]` float32 on the device; nothing is changed if it is 1. None for 0.
        """
        if not params:
            return
        import torch

        # The kernel reads the step on the device; filling it from the host does not wait for it.
        steps = torch.full((), float(step), dtype=torch.float32, device=params[0].device)
        torch._fused_adam_(
            list(params),
            list(grads),
            list(exp_avgs),
            list(exp_avg_sqs),
            [],
            [steps] * len(params),
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=2.0 * l2,
            eps=self.torch_eps(step),
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )

    def torch_eps(self, step: int) -> float:
        """The epsilon with which torch's Adam, correcting the bias first, computes this rule."""
        if self.eps_placement == "torch":
            return self.eps
        return self.eps / math.sqrt(1.0 - self.betas[1] ** step)


@dataclass(frozen=True)
class RowWiseAdam(Adam):
    """Adam with one second moment per row, as FBGEMM's PARTIAL_ROWWISE_ADAM.

    `v = b2*v + (1-b2)*mean(g*g)` over the clipped columns of the row. The other columns share
    another, of the sum of their squares: with a single such column (a first-order weight) that is
    Adam.

    Args:
        betas, eps, eps_placement: see `Adam`.
    """

    element_states: ClassVar[tuple[str, ...]] = ("exp_avg",)
    row_states: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)

    def step_(self, rows: RowStep) -> None:
        """See `Rule.step_`."""
        (beta1, beta2), step = self.betas, rows.step
        exp_avg = rows.states["exp_avg"].lerp_(rows.grads, 1.0 - beta1)
        correction, eps = math.sqrt(1.0 - beta2**step), self.torch_eps(step)
        divisor = rows.row_divisor("exp_avg_sq", beta2, 1.0 - beta2, correction, eps)
        rows.weights.addcdiv_(exp_avg, divisor, value=-rows.lr / (1.0 - beta1**step))


@dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad: `s = s + g*g; w = w - lr * g / (sqrt(s) + eps)`, one sum per element.

    Args:
        eps: added to the denominator, above 0.
    """

    element_states: ClassVar[tuple[str, ...]] = ("sum",)

    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_number("eps", self.eps, "above 0")

    def step_(self, rows: RowStep) -> None:
        """See `Rule.step_`."""
        total = rows.states["sum"].addcmul_(rows.grads, rows.grads)
        rows.weights.addcdiv_(rows.grads, total.sqrt().add_(self.eps), value=-rows.lr)


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one sum per row, as FBGEMM's EXACT_ROWWISE_ADAGRAD: of its mean square.

    Over the clipped columns; the other columns share another sum, see `RowWiseAdam`.

    Args:
        eps: see `Adagrad`.
    """

    element_states: ClassVar[tuple[str, ...]] = ()
    row_states: ClassVar[tuple[str, ...]] = ("sum",)

    def step_(self, rows: RowStep) -> None:
        """See `Rule.step_`."""
        divisor = rows.row_divisor("sum", 1.0, 1.0, 1.0, self.eps)
        rows.weights.addcdiv_(rows.grads, divisor, value=-rows.lr)


@dataclass(frozen=True)
class SGD(Rule):
    """`b = momentum*b + g; w = w - lr*b`, as torch's SGD; without momentum no state.

    Args:
        momentum: factor of the earlier steps, in [0, 1).
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum!r}; write a number in [0, 1)")

    @property
    def element_states(self) -> tuple[str, ...]:  # type: ignore[override]
        """The buffer, if there is momentum."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def moves_without_gradient(self) -> bool:  # type: ignore[override]
        """Whether there is momentum."""
        return self.momentum > 0.0

    def step_(self, rows: RowStep) -> None:
        """See `Rule.step_`."""
        grads = rows.grads
        if self.momentum:
            grads = rows.states["momentum_buffer"].mul_(self.momentum).add_(grads)
        rows.weights.add_(grads, alpha=-rows.lr)


@dataclass(frozen=True)
class NoStep(Rule):
    """Leaves rows as they are."""

    is_frozen: ClassVar[bool] = True

    def step_(self, rows: RowStep) -> None:
        """See `Rule.step_`."""


def as_setting(given: Any) -> Any:
    """A setting as the rules hold it, a sequence as a tuple; others are left to their checks."""
    try:
        return given if isinstance(given, str) else tuple(given)
    except TypeError:
        return given


def _is_number(value: Any) -> bool:
    # A protocol is slow to check, and each step makes a rule.
    return isinstance(value, float | int | SupportsFloat)


def check_number(name: str, value: float, least: str = "of at least 0") -> None:
    """Raise ValueError unless a setting is finite and `of at least 0`, or `above 0`."""
    # YAML reads `1e-4`, which has no point, as text.
    is_number = _is_number(value) and 0 <= value < math.inf
    if not is_number or (value == 0 and least == "above 0"):
        raise ValueError(f"{name} is {value!r}; write a number {least}")


def step_constants(
    rule: Adam, lr: float, step: int, weight_decay: float = 0.0
) -> tuple[float, float, float]:
    """Adam's step as three numbers: `w = keep*w - alpha * m / (sqrt(v) + eps)`.

    `alpha = lr * sqrt(1-b2^t) / (1-b1^t)`, `eps`, and `keep = 1 - lr*weight_decay`.
    """
    beta1, beta2 = rule.betas
    correction = math.sqrt(1.0 - beta2**step)
    eps = rule.eps if rule.eps_placement == "keras" else rule.eps * correction
    return lr * correction / (1.0 - beta1**step), eps, 1.0 - lr * weight_decay
