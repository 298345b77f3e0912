"""Settings of a table's update, apart from the learning rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from stampede.optim.clip import Clip, CowClip
from stampede.optim.rules import Adam, Rule, check_number

Rows = Literal["all", "touched"]
OnNonfinite = Literal["error", "skip_row"]
# What updates tables on a GPU, see `cowclip_sharders`.
Kernels = Literal["auto", "torch", "triton"]


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of one table's update, apart from the learning rate. Hashable.

    Args:
        rule: the base optimizer.
        clip: the clipping rule.
        l2: coefficient of ||w||^2 in the loss: adds `2*l2*w` to the gradient, inside the clip.
        weight_decay: decoupled decay, w = w * (1 - lr*weight_decay) before the step, outside the
            clip (AdamW); never scaled.
        rows: rows that take a step (momentum, L2 and decay): all, as in the authors' code, or
            those in the batch (touched), as in TorchRec and SparseAdam.
        on_nonfinite: what to do about a NaN or infinity in a row's gradient: refuse the step
            (error), or leave the row out of the batch (skip_row).
        seed: of the stochastic rounding of fp16 and bf16 tables.
    """

    rule: Rule = field(default_factory=Adam)
    clip: Clip = field(default_factory=CowClip)
    l2: float = 0.0
    weight_decay: float = 0.0
    rows: Rows = "all"
    on_nonfinite: OnNonfinite = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("l2", "weight_decay"):
            check_number(name, getattr(self, name))
        if self.rule.is_frozen and (self.l2 or self.weight_decay):
            raise ValueError("a frozen table has no l2 and no weight_decay; leave them out")
        if not isinstance(self.clip, Clip):
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
