"""Learning-rate schedules: a linear warm-up, then a constant rate or a decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

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
        self._check_choice("decay", ("constant", "polynomial", "cosine", "step"))
        self._check_choice("unit", ("epochs", "steps"))
        self._check_number("warmup", self.warmup >= 0, "a number of at least 0")
        positive = "a number above 0"
        if self.length is not None:
            self._check_number("length", self.length > 0, f"{positive}, or None")
        self._check_number("power", self.power > 0, positive)
        self._check_number("every", self.every > 0, positive)
        for name in ("final", "factor"):
            self._check_number(name, 0 <= getattr(self, name) <= 1, "a number from 0 to 1")
        self._check_used()

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(
                f"Schedule: {name} is {getattr(self, name)!r}; write one of {', '.join(choices)}"
            )

    def _check_number(self, name: str, in_range: bool, expected: str) -> None:
        value = getattr(self, name)
        if not (in_range and math.isfinite(value)):
            raise ValueError(f"Schedule: {name} is {value!r}; write {expected}")

    def _check_used(self) -> None:
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
    return base_lr * _decayed(schedule, step - warmup, unit, total_steps - warmup)


def _decayed(schedule: Schedule, step: int, unit: int, remaining: int) -> float:
    """Fraction of the full rate, `step` steps after the warm-up and `remaining` before the end.

    Args:
        unit: steps in one of the schedule's units.
    """
    if schedule.decay == "constant":
        return 1.0
    if schedule.decay == "step":
        # In floating point 0.07 * 100 is more than 7; a drop is due to a millionth of a step.
        return schedule.factor ** int((step + 1e-6) / (schedule.every * unit))
    length = remaining if schedule.length is None else schedule.length * unit
    left = max(0.0, 1 - step / length) if length > 0 else 0.0
    if schedule.decay == "polynomial":
        shape = left**schedule.power
    else:
        shape = (1 - math.cos(math.pi * left)) / 2
    return schedule.final + (1 - schedule.final) * shape
