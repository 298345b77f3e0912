"""Rules that turn the settings of a base batch size into those of a larger one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

ScalingRule = Literal["none", "linear", "sqrt", "sqrt_star", "n2_lambda", "cowclip"]


@dataclass(frozen=True)
class Hyperparameters:
    """The settings that depend on the batch size.

    Attributes:
        embedding_lr: learning rate of the tables.
        embedding_l2: L2 coefficient of the tables.
        dense_lr: learning rate of the dense layers.
    """

    embedding_lr: float
    embedding_l2: float
    dense_lr: float


_Factors = tuple[Callable[[float], float], Callable[[float], float], Callable[[float], float]]


def _one(_: float) -> float:
    return 1.0


def _same(s: float) -> float:
    return s


# Factors of (embedding_lr, embedding_l2, dense_lr) for a batch s times the base.
_RULES: dict[ScalingRule, _Factors] = {
    "none": (_one, _one, _one),
    "linear": (_same, _one, _same),
    "sqrt": (math.sqrt, math.sqrt, math.sqrt),
    "sqrt_star": (math.sqrt, _one, math.sqrt),
    "n2_lambda": (_one, lambda s: s * s, math.sqrt),
    "cowclip": (_one, _same, math.sqrt),
}


def scale(
    base: Hyperparameters, rule: ScalingRule, batch_size: int, base_batch_size: int
) -> Hyperparameters:
    """Settings for `batch_size`, given those for `base_batch_size`.

    Args:
        base: settings at the base batch size.
        rule: name of the rule (table in the paper's section on scaling).
        batch_size, base_batch_size: samples in a global batch.

    Raises:
        ValueError: unknown rule, or a batch size below 1.
    """
    if rule not in _RULES:
        raise ValueError(f"scaling rule is {rule!r}; write one of {', '.join(_RULES)}")
    if batch_size < 1 or base_batch_size < 1:
        raise ValueError("batch sizes must be at least 1")
    s = batch_size / base_batch_size
    embedding_lr, embedding_l2, dense_lr = (factor(s) for factor in _RULES[rule])
    return replace(
        base,
        embedding_lr=base.embedding_lr * embedding_lr,
        embedding_l2=base.embedding_l2 * embedding_l2,
        dense_lr=base.dense_lr * dense_lr,
    )
