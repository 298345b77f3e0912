"""The base optimizers under the clip: how a row moves, given its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

EpsPlacement = Literal["keras", "torch"]


@dataclass
class RowGradientSquares:
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

    Attributes:
        weights: `[n, dim]` float.
        grads: `[n, dim]` gradients after L2 and clip; may be overwritten.
        states: the rows' states by name, changed in place.
        squares: of `grads`; given if the rule has row states.
    """

    weights: Tensor
    grads: Tensor
    states: dict[str, Tensor]
    squares: RowGradientSquares | None
    lr: float
    step: int


@dataclass(frozen=True)
class Rule:
    """A base optimizer: its settings, the state it keeps and its step. Hashable.

    Class attributes:
        element_states: names of the states shaped like the weights, `[rows, dim]` float32.
        row_states: names of the states with one value a row, `[rows]` float32. Each has a twin
            `<name>_rest` for the columns that are not clipped, if there are such columns.
        moves_without_gradient: whether a row with a zero gradient moves (momentum).
    """

    element_states: ClassVar[tuple[str, ...]] = ()
    row_states: ClassVar[tuple[str, ...]] = ()
    moves_without_gradient: ClassVar[bool] = False

    def step_(self, rows: RowStep) -> None:
        """Move rows, in place."""
        raise NotImplementedError

    def state_shapes(self, rows: int, dim: int, has_rest: bool) -> dict[str, tuple[int, ...]]:
        """Shape of every state, by name; `has_rest`: some columns of the table are not clipped."""
        shapes: dict[str, tuple[int, ...]] = {name: (rows, dim) for name in self.element_states}
        for name in self.row_states:
            shapes[name] = (rows,)
            if has_rest:
                shapes[rest(name)] = (rows,)
        return shapes


@dataclass(frozen=True)
class Adam(Rule):
    """Adam: two moments per element; see `update_`."""

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

    def step_(self, rows: RowStep) -> None:
        """See `Rule.step_`."""
        moments = rows.states["exp_avg"], rows.states["exp_avg_sq"]
        self.update_([rows.weights], [rows.grads], *([m] for m in moments), rows.lr, rows.step)

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
    """

    element_states: ClassVar[tuple[str, ...]] = ("exp_avg",)
    row_states: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)

    def step_(self, rows: RowStep) -> None:
        """See `Rule.step_`."""
        weights, grads, states, squares, lr, step = rows
        beta1, beta2 = self.betas
        exp_avg = states["exp_avg"].lerp_(grads, 1.0 - beta1)
        row, others = states["exp_avg_sq"], states.get(rest("exp_avg_sq"))
        row.mul_(beta2).add_(squares.embedding, alpha=(1.0 - beta2) / squares.width)
        if others is not None:
            others.mul_(beta2).add_(squares.rest, alpha=1.0 - beta2)
        correction = math.sqrt(1.0 - beta2**step)
        eps = self.torch_eps(step)
        denominators = [
            None if values is None else values.sqrt().div_(correction).add_(eps)
            for values in (row, others)
        ]
        divisor = spread(*denominators, squares.local_width, weights.shape[1])
        weights.addcdiv_(exp_avg, divisor.expand_as(exp_avg), value=-lr / (1.0 - beta1**step))


@dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad: `s = s + g*g; w = w - lr * g / (sqrt(s) + eps)`, one sum per element."""

    element_states: ClassVar[tuple[str, ...]] = ("sum",)

    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_eps(self.eps)

    def step_(self, rows: RowStep) -> None:
        """See `Rule.step_`."""
        weights, grads, states, _, lr, _ = rows
        total = states["sum"].addcmul_(grads, grads)
        weights.addcdiv_(grads, total.sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one sum per row, as FBGEMM's EXACT_ROWWISE_ADAGRAD: of its mean square.

    Over the clipped columns; the other columns share another sum, see `RowWiseAdam`.
    """

    element_states: ClassVar[tuple[str, ...]] = ()
    row_states: ClassVar[tuple[str, ...]] = ("sum",)

    def step_(self, rows: RowStep) -> None:
        """See `Rule.step_`."""
        weights, grads, states, squares, lr, _ = rows
        row, others = states["sum"], states.get(rest("sum"))
        row.add_(squares.embedding, alpha=1.0 / squares.width)
        if others is not None:
            others.add_(squares.rest)
        denominators = [
            None if values is None else values.sqrt().add_(self.eps) for values in (row, others)
        ]
        divisor = spread(*denominators, squares.local_width, weights.shape[1])
        weights.addcdiv_(grads, divisor.expand_as(grads), value=-lr)


@dataclass(frozen=True)
class SGD(Rule):
    """`b = momentum*b + g; w = w - lr*b`, as torch's SGD; without momentum, in [0, 1), no state."""

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
        weights, grads, states, _, lr, _ = rows
        if self.momentum:
            grads = states["momentum_buffer"].mul_(self.momentum).add_(grads)
        weights.add_(grads, alpha=-lr)


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError unless `betas` are two decay rates."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas is {betas!r}; write two numbers in [0, 1)")


def check_eps(eps: float) -> None:
    """Raise ValueError unless `eps` is finite and above 0."""
    # 0 would divide 0 by 0 for a row that never had a gradient.
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps is {eps!r}; write a number above 0")


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


def rest(row_state: str) -> str:
    """Name of a row state's twin for the columns that are not clipped."""
    return f"{row_state}_rest"


def spread(embedding: Tensor, rest_values: Tensor | None, local_width: int, dim: int) -> Tensor:
    """Values `[n]` of the clipped columns and of the others, broadcastable to `[n, dim]`."""
    if rest_values is None or local_width == dim:
        return embedding[:, None]
    if local_width == 0:
        return rest_values[:, None]
    return torch.cat(
        [
            embedding[:, None].expand(-1, local_width),
            rest_values[:, None].expand(-1, dim - local_width),
        ],
        dim=1,
    )
