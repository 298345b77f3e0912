# pyright: basic
"""Rules that scale the settings of a base batch size to a larger one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

ScalingRule = Literal["none", "linear", "sqrt", "sqrt_star", "n2_lambda", "cowclip"]


@dataclass(frozen=True)
class Hyperparameters:
    """The settings that depend on the batch size, of tables and dense layers."""

    embedding_lr: float
    embedding_l2: float
    dense_lr: float


# Factors of (embedding_lr, embedding_l2, dense_lr) for a batch s times the base.
_RULES: dict[ScalingRule, Callable[[float], tuple[float, float, float]]] = {
    "none": lambda s: (1.0, 1.0, 1.0),
    "linear": lambda s: (s, 1.0, s),
    "sqrt": lambda s: (math.sqrt(s), math.sqrt(s), math.sqrt(s)),
    "sqrt_star": lambda s: (math.sqrt(s), 1.0, math.sqrt(s)),
    "n2_lambda": lambda s: (1.0, s * s, math.sqrt(s)),
    "cowclip": lambda s: (1.0, s, math.sqrt(s)),
}


@dataclass(frozen=True)
class Scaled:
    """Settings at the base batch size and `scaled` to `batch_size`, both of a global batch."""

    rule: ScalingRule
    batch_size: int
    base_batch_size: int
    base: Hyperparameters
    scaled: Hyperparameters

    def table(self) -> str:
        """The changes as plain text: a line for each setting, at most 100 columns.

        Without a rule, only the settings.

        Example::

            scaling rule cowclip  batch 1024  factor  batch 8192
              embedding_lr             0.003     x 1       0.003
              embedding_l2             1e-05     x 8       8e-05
              dense_lr                0.0008  x 2.83     0.00226
        """
        base, size = f"batch {self.base_batch_size}", f"batch {self.batch_size}"
        rows = [(f"scaling rule {self.rule}", base, "factor", size)]
        factors = _RULES[self.rule](self.batch_size / self.base_batch_size)
        settings = zip(vars(self.base).items(), factors, vars(self.scaled).values(), strict=True)
        for (name, before), factor, after in settings:
            rows.append((f"  {name}", f"{before:.3g}", f"x {factor:.3g}", f"{after:.3g}"))
        if self.rule == "none":
            rows = [(name, value) for name, *_, value in rows]
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(
            "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows
        )


def scale(
    base: Hyperparameters, rule: ScalingRule, batch_size: int, base_batch_size: int
) -> Scaled:
    """Settings for `batch_size`, given those for `base_batch_size`; `table()` shows what changed.

    The rules are from the table in the paper's section on scaling.

    Raises:
        ValueError: unknown rule, or a batch size below 1.

    Example::

        change = scale(Hyperparameters(1e-4, 1e-5, 8e-4), "cowclip", 8192, 1024)
        print(change.table())
        optimizer = torch.optim.Adam(model.parameters(), lr=change.scaled.dense_lr)
    """
    if rule not in _RULES:
        raise ValueError(f"scaling rule is {rule!r}; write one of {', '.join(_RULES)}")
    if batch_size < 1 or base_batch_size < 1:
        raise ValueError(
            f"batch sizes are {batch_size} and, as the base, {base_batch_size}; "
            "write numbers of at least 1"
        )
    factors = _RULES[rule](batch_size / base_batch_size)
    scaled = (value * factor for value, factor in zip(vars(base).values(), factors, strict=True))
    return Scaled(rule, batch_size, base_batch_size, base, Hyperparameters(*scaled))
