"""The sections that describe learning-rate schedules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from stampede.optim import Schedule
from stampede.optim.schedules import Decay
from stampede.settings import Section


class ScheduleSection(Section):
    """How the learning rate changes in the course of training."""

    warmup: float = Field(
        0.0, ge=0, description="length of the linear warm-up from 1e-8, in units; 0: none"
    )
    decay: Decay | None = Field(
        None, description="what follows the warm-up; null: by the recipe, else constant"
    )
    unit: Literal["epochs", "steps"] = Field(
        "epochs", description="unit of warmup, length and every"
    )
    length: float | None = Field(
        None,
        gt=0,
        description="polynomial, cosine: length of the decay after the warm-up, in units; null: "
        "up to the end of training",
    )
    final: float = Field(
        0.0, ge=0, le=1, description="polynomial, cosine: rate at the end, as a fraction of lr"
    )
    power: float = Field(1.0, gt=0, description="polynomial: exponent; 1 is a straight line")
    every: float = Field(
        1.0, gt=0, description="step: distance of the drops, in units, from the warm-up's end on"
    )
    factor: float = Field(
        0.1, ge=0, le=1, description="step: what each drop multiplies the rate by"
    )

    @model_validator(mode="after")
    def _check_keys_together(self) -> ScheduleSection:
        try:
            self.as_schedule()
        except ValueError as failure:
            raise ValueError(str(failure).removeprefix("Schedule: ")) from None
        return self

    def as_schedule(self) -> Schedule:
        """The same, for the learning rates' formulas; nothing is left to the recipe."""
        given = self.model_dump()
        given["warmup"] = given["warmup"] or 0.0
        given["decay"] = given["decay"] or "constant"
        return Schedule(**given)


class DenseScheduleSection(ScheduleSection):
    """The same; its warm-up may be left to the recipe."""

    warmup: float | None = Field(
        None,
        ge=0,
        description="length of the linear warm-up from 1e-8, in units; 0: none; null: by the "
        "recipe, in epochs",
    )

    @model_validator(mode="after")
    def _check_unit_of_default(self) -> DenseScheduleSection:
        if self.unit == "steps" and self.warmup is None:
            raise ValueError(
                "unit is 'steps' but warmup is not given, and the recipe's is in epochs; write "
                "warmup in steps, 0 for none"
            )
        return self


class PlateauSection(Section):
    """Reduction of the rate, on top of the schedule, when the AUC no longer rises."""

    factor: float = Field(
        1.0, gt=0, le=1, description="what a reduction multiplies the rate by; 1: none"
    )
    patience: int = Field(
        2,
        ge=0,
        description="evaluations in a row, those within an epoch included, that may be no better "
        "than the best so far on evaluate.select_on; the next such one reduces",
    )
    threshold: float = Field(
        1e-4, ge=0, description="AUC by which an evaluation must exceed the best to be better"
    )
    least: float = Field(
        0.01, ge=0, le=1, description="least fraction of the scheduled rate, however often reduced"
    )
