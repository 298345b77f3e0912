"""Ranges of numbers, and their transforms."""

from __future__ import annotations

import math
from collections.abc import Mapping

import polars as pl
from pydantic import Field, model_validator

from stampede.data.formulas import filled, scaled
from stampede.data.schema.columns import NumberField
from stampede.settings import Section


class NumberRange(Section):
    """A number in the training part, after filling and `log1p`.

    Attributes:
        rows: values seen.
        low, high: smallest and largest.
        mean: arithmetic mean.
        squares: sum of the squared distances from the mean.
    """

    rows: int = Field(0, ge=0, lt=2**62)
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    squares: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _a_range_is_of_rows(self) -> NumberRange:
        if self.low > self.high or (self.low < self.high and not self.rows):
            raise ValueError(f"{self.rows} values from {self.low:g} to {self.high:g}")
        return self

    @property
    def deviation(self) -> float:
        """Standard deviation; 0 for one value, whose squares may be more by rounding."""
        return math.sqrt(self.squares / self.rows) if self.high > self.low else 0.0

    def merged(self, other: NumberRange) -> NumberRange:
        """Of both sets of values (Chan, Golub and LeVeque 1983)."""
        if not self.rows or not other.rows:
            return self if self.rows else other
        rows = self.rows + other.rows
        apart = other.mean - self.mean
        return NumberRange(
            rows=rows,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            mean=self.mean + apart * other.rows / rows,
            squares=self.squares + other.squares + apart**2 * self.rows * other.rows / rows,
        )


def ranges(chunk: pl.DataFrame, fields: Mapping[str, NumberField]) -> dict[str, NumberRange]:
    """Ranges of the numbers in some rows."""
    if not len(chunk) or not fields:
        return {name: NumberRange() for name in fields}
    found = chunk.lazy().select(
        pl.struct(
            low=_filled(name, field).min(),
            high=_filled(name, field).max(),
            mean=_filled(name, field).mean(),
            squares=_filled(name, field).var(ddof=0) * len(chunk),
        ).alias(name)
        for name, field in fields.items()
    )
    row = found.collect().row(0, named=True)
    return {name: NumberRange(rows=len(chunk), **row[name]) for name in fields}


def _filled(name: str, field: NumberField) -> pl.Expr:
    return filled(pl.col(name), field.fill, field.transform or ())


def transformed(name: str, field: NumberField, seen: NumberRange) -> pl.Expr:
    """The network's input of a column: Float32."""
    value = _filled(name, field)
    value = scaled(value, field.transform, seen.low, seen.high, seen.mean, seen.deviation)
    return value.alias(name)
