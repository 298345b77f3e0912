"""Settings of a table's update, apart from the learning rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from stampede.optim.clip import CowClip
from stampede.optim.rules import Adam, Rule, check_number

Rows = Literal["all", "touched"]
OnNonfinite = Literal["error", "skip_row"]
# What updates tables on a GPU, see `cowclip_sharders`.
Kernels = Literal["auto", "torch", "triton"]

# Avoids 0/0 for a table without gradient; the constant of Helen's repository.
_NORM_FLOOR = 1e-12


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of one table's update, apart from the learning rate. Hashable.

    Attributes:
        rule: the base optimizer.
        clip: the clipping rule.
        l2: coefficient of `||w||^2` in the loss; adds `2*l2*w` to the gradient, inside the clip.
        weight_decay: decoupled decay, `w = w * (1 - lr*weight_decay)` before the step, outside the
            clip (AdamW).
        rows: `all`, every row takes a step (momentum, L2 and decay), or `touched`, only the rows
            of the batch.
        on_nonfinite: what to do about a NaN or an infinity in a row's gradient: `error` refuses the
            whole backward pass, `skip_row` takes the row as absent from the batch.
        seed: of the stochastic rounding of fp16 and bf16 tables.
    """

    rule: Rule = field(default_factory=Adam)
    clip: CowClip = field(default_factory=CowClip)
    l2: float = 0.0
    weight_decay: float = 0.0
    rows: Rows = "all"
    on_nonfinite: OnNonfinite = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("l2", "weight_decay"):
            check_number(name, getattr(self, name))
        if not isinstance(self.clip, CowClip):
            raise ValueError(f"clip is {self.clip!r}; write a CowClip(...), or None for no clip")
        for name, allowed in (("rows", Rows), ("on_nonfinite", OnNonfinite)):
            if getattr(self, name) not in get_args(allowed):
                one, other = get_args(allowed)
                raise ValueError(f"{name} is {getattr(self, name)!r}; write {one!r} or {other!r}")

    @property
    def moves_untouched_rows(self) -> bool:
        """Whether a row that is not in the batch changes."""
        moves = self.rule.moves_without_gradient or self.l2 > 0 or self.weight_decay > 0
        return self.rows == "all" and moves

    @property
    def needs_all_rows(self) -> bool:
        """Whether a step must know the norms or row states of rows that are not in the batch."""
        return self.moves_untouched_rows and (
            self.clip.may_clip_decay(self.l2) or bool(self.rule.row_states)
        )


@dataclass(frozen=True)
class HelenSettings:
    """Settings of one parameter's step by `Helen`, apart from the learning rate. Hashable.

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
    rows: Rows = "all"
    l2: float = 0.0
    columns: int | None = None

    def __post_init__(self) -> None:
        for name in ("rho", "weight_decay", "l2"):
            check_number(f"Helen: {name}", getattr(self, name))
        if not 0.0 <= self.bound <= 1.0:
            raise ValueError(f"Helen: bound is {self.bound!r}; write a number from 0 to 1")
        Adam(self.betas, self.eps)

    def second_pass(self) -> UpdateSettings:
        """The update with the second gradient: Adam with torch's epsilon, without a clip."""
        return UpdateSettings(
            rule=Adam(self.betas, self.eps, "torch"),
            clip=CowClip(granularity="none", columns=self.columns),
            # The update adds `2*l2*w`, Helen's weight decay is `weight_decay*w`.
            l2=self.l2 + self.weight_decay / 2.0,
            rows=self.rows,
        )

    def perturbation(
        self, grads: Tensor, counts: Tensor, grad_norm: Tensor, max_count: Tensor
    ) -> Tensor:
        """How far the first pass moves each row of a table, or of a part of it.

        `e_i = rho * g_i / (||g|| + 1e-12) * max(c_i / max_j c_j, bound)`; `||g||` and `max_j` run
        over the whole table.

        Args:
            grads: `[n, dim]` gradients of the mean loss.
            counts: `[n]` int, how often each row occurs in the global batch.
        """
        # Half precision would turn 1e-12 into 0.
        dtype = torch.promote_types(grads.dtype, torch.float32)
        factors = (counts.to(dtype) / max_count.to(dtype).clamp(min=1)).clamp(min=self.bound)
        scale = self.rho / (grad_norm.to(dtype) + _NORM_FLOOR)
        return (grads * (scale * factors).unsqueeze(1)).to(grads.dtype)

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
        stretch = 2.0 * self.l2 * self.rho * self.bound / (grad_norms + _NORM_FLOOR)
        decay = self.weight_decay + 2.0 * self.l2
        return (decay + 2.0 * self.l2 * stretch) / decay
