"""Linear warm-up of a learning rate."""

from __future__ import annotations

# The reference starts its warm-up here rather than at 0 (authors' train.py, PolynomialDecay).
WARMUP_START = 1e-8


def linear_warmup(step: int, warmup_steps: int, lr: float) -> float:
    """Learning rate of a step: a straight line from 1e-8 to `lr`, then constant.

    Args:
        step: steps taken before this one; 0 for the first.
        warmup_steps: steps until `lr` is reached; 0 for none.
        lr: the learning rate after the warm-up.
    """
    if step >= warmup_steps:
        return lr
    return WARMUP_START + (lr - WARMUP_START) * step / warmup_steps
