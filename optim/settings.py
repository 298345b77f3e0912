"""Settings of a table's update, apart from the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from stampede.optim.clip import CowClip
from stampede.optim.rules import Adam, Rule

Rows = Literal["all", "touched"]
OnNonfinite = Literal["error", "skip_row"]

# State of adaptive regularisation: the last step with the row in its batch, 0 for none.
LAST_STEP = "last_step"


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of one table's update, apart from the learning rate. Hashable.

    Attributes:
        rule: the base optimizer.
        clip: the clipping rule.
        l2: coefficient of `||w||^2` in the loss; adds `2*l2*w` to the gradient, inside the clip.
        weight_decay: decoupled decay, `w = w * (1 - lr*weight_decay)` before the step, outside the
            clip (AdamW).
        ar_alpha: adaptive regularisation (Li and Lyu, arXiv 2511.06374, algorithm 2, as FBGEMM's
            ROWWISE_RMSPROP_AR): a row of the batch is first multiplied by
            `max(min_shrinkage, 1 - min(1, lr*ar_alpha*gap))`, `gap` being the steps since it was
            last in a batch, 1 for its first. So rare ids decay as much over time as frequent ones.
            Only with `rows="touched"`; 0 for none.
        min_shrinkage: see `ar_alpha`.
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
    ar_alpha: float = 0.0
    min_shrinkage: float = 0.1

    def __post_init__(self) -> None:
        for name in ("l2", "weight_decay", "ar_alpha"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value!r}; write a number of at least 0")
        for name, allowed in (("rows", Rows), ("on_nonfinite", OnNonfinite)):
            if getattr(self, name) not in get_args(allowed):
                one, other = get_args(allowed)
                raise ValueError(f"{name} is {getattr(self, name)!r}; write {one!r} or {other!r}")
        if not 0 <= self.min_shrinkage <= 1:
            raise ValueError(f"min_shrinkage is {self.min_shrinkage!r}; write a number from 0 to 1")
        if self.ar_alpha and self.rows != "touched":
            raise ValueError(
                f"ar_alpha is {self.ar_alpha!r}, but rows is {self.rows!r}; write rows='touched': "
                "it replaces the decay of rows that no batch holds"
            )

    def state_shapes(self, rows: int, dim: int, has_rest: bool) -> dict[str, tuple[int, ...]]:
        """Shape of every state by name, see `Rule.state_shapes`."""
        own = {LAST_STEP: (rows,)} if self.ar_alpha else {}
        return {**self.rule.state_shapes(rows, dim, has_rest), **own}

    @property
    def moves_untouched_rows(self) -> bool:
        """Whether a row that is not in the batch changes."""
        moves = self.rule.moves_without_gradient or self.l2 > 0 or self.weight_decay > 0
        return self.rows == "all" and moves

    @property
    def needs_all_rows(self) -> bool:
        """Whether a step must know the norms or row states of rows that are not in the batch."""
        if self.rows == "all" and self.clip.granularity == "field_adaptive":
            return True
        return self.moves_untouched_rows and (
            self.clip.may_clip_decay(self.l2) or bool(self.rule.row_states)
        )
