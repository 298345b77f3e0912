# pyright: basic
"""Learning-rate schedules: a linear warm-up, then a constant rate or a decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Decay = Literal["constant", "polynomial", "cosine", "step"]

# The reference starts its warm-up here rather than at 0 (authors' train.py, PolynomialDecay).
WARMUP_START = 1e-8

# Fields that only some decays use.
_USED_BY: dict[str, tuple[Decay, ...]] = {
    "length": ("polynomial", "cosine"),
    "final": ("polynomial", "cosine"),
    "power": ("polynomial",),
    "every": ("step",),
    "factor": ("step",),
}


@dataclass(frozen=True)
class Schedule:
    """How a learning rate changes during training.

    Args:
        warmup: length of the linear warm-up from 1e-8; 0 for none.
        decay: what follows: `constant`, `polynomial`, `cosine` or `step`.
        unit: of `warmup`, `length` and `every`: `epochs` or `steps`.
        length: length of a polynomial or cosine decay, after the warm-up; `None`: up to the end of
            training.
        final: rate at the end of a polynomial or cosine decay, as a fraction of the full one.
        power: exponent of the polynomial decay; 1 is a straight line.
        every: distance of the drops of the step decay; the first comes that long after the warm-up.
        factor: what each drop multiplies the rate by.

    Raises:
        ValueError: a value is out of range, or was set although the decay does not use it.
    """

    warmup: float = 0
    decay: Decay = "constant"
    unit: Literal["epochs", "steps"] = "epochs"
    length: float | None = None
    final: float = 0.0
    power: float = 1.0
    every: float = 1
    factor: float = 0.1

    def __post_init__(self) -> None:
        for name, choices in (("decay", get_args(Decay)), ("unit", ("epochs", "steps"))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"Schedule: {name} is {getattr(self, name)!r}; write one of "
                    f"{', '.join(choices)}"
                )
        ranges = {
            "warmup": (self.warmup >= 0, "a number of at least 0"),
            "length": (self.length is None or self.length > 0, "a number above 0, or leave it out"),
            "power": (self.power > 0, "a number above 0"),
            "every": (self.every > 0, "a number above 0"),
            "final": (0 <= self.final <= 1, "a number from 0 to 1"),
            "factor": (0 <= self.factor <= 1, "a number from 0 to 1"),
        }
        for name, (in_range, expected) in ranges.items():
            value = getattr(self, name)
            if not (in_range and math.isfinite(value or 0)):
                raise ValueError(f"Schedule: {name} is {value!r}; write {expected}")
        for name, decays in _USED_BY.items():
            value = getattr(self, name)
            if self.decay not in decays and value != getattr(Schedule, name):
                raise ValueError(
                    f"Schedule: {name} is {value!r}, which decay {self.decay!r} does not use; "
                    f"leave it out, or choose decay {' or '.join(map(repr, decays))}"
                )


def learning_rate(
    schedule: Schedule, base_lr: float, step: int, steps_per_epoch: float, total_steps: int
) -> float:
    """Learning rate of a step.

    Args:
        base_lr: the full rate, reached at the end of the warm-up.
        step: steps taken before this one; 0 for the first.
        steps_per_epoch: rows over batch size. A fraction means that the last batch of an epoch is
            not whole: it is a step, but the warm-up counts whole batches only.
        total_steps: steps of the whole training.
    """
    in_epochs = schedule.unit == "epochs"
    # The reference counts whole batches (authors' train.py).
    warmup = int(schedule.warmup * (int(steps_per_epoch) if in_epochs else 1))
    if step < warmup:
        start = min(WARMUP_START, base_lr)
        return start + (base_lr - start) * step / warmup
    unit = math.ceil(steps_per_epoch) if in_epochs else 1
    after = step - warmup
    if schedule.decay == "constant":
        return base_lr
    if schedule.decay == "step":
        # In floating point 0.07 * 100 is more than 7; a drop is due to a millionth of a step.
        return base_lr * schedule.factor ** int((after + 1e-6) / (schedule.every * unit))
    length = total_steps - warmup if schedule.length is None else schedule.length * unit
    left = max(0.0, 1 - after / length) if length > 0 else 0.0
    if schedule.decay == "polynomial":
        shape = left**schedule.power
    else:
        shape = (1 - math.cos(math.pi * left)) / 2
    return base_lr * (schedule.final + (1 - schedule.final) * shape)
