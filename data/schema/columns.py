"""Inputs that a schema makes of columns: id fields, numbers, label, time."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from stampede.data.prepared.manifest import MOST_ROWS
from stampede.settings import Section, Seed

_COLUMN = Field("", description="column it is made of; default: the one of its own name")
# One more is for a missing value.
_Rows = Annotated[int, Field(ge=1, lt=MOST_ROWS)]


class _ManyIds(Section):
    """Keys of fields whose cells may hold several ids."""

    column: str = _COLUMN
    separator: str | None = Field(
        None, min_length=1, description="text between the ids of one cell; none: one id per cell"
    )
    max_ids: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="ids of a cell that are kept, from its start; needs a separator",
    )

    @model_validator(mode="after")
    def _only_cells_of_many_are_cut(self) -> _ManyIds:
        if self.max_ids is not None and self.separator is None:
            raise ValueError("max_ids is given but no separator; write both or neither")
        return self


class Vocabulary(_ManyIds):
    """Ids that the training part has get a row each."""

    encode: Literal["vocabulary"] = Field("vocabulary", description="how ids become rows")
    min_count: int | None = Field(
        None,
        ge=1,
        lt=2**62,
        description="rarer ids share one row with unseen ones; none: chosen by data.features",
    )
    max_size: int | None = Field(
        None, ge=1, lt=2**62, description="most frequent ids that get a row of their own; none: all"
    )


class Hashed(_ManyIds):
    """Ids share a given number of rows by a hash of their text."""

    encode: Literal["hash"] = Field("hash", description="how ids become rows")
    buckets: _Rows = Field(description="rows that ids share")
    seed: Seed = Field(0, description="seed of the hash")


class Integers(_ManyIds):
    """Whole numbers that are rows already: id i has row i."""

    encode: Literal["integer"] = Field("integer", description="how ids become rows")
    size: _Rows = Field(description="rows; ids are 0 to size - 1")


class Quantiles(Section):
    """A number cut into buckets that hold the same share of the training part."""

    encode: Literal["quantiles"] = Field("quantiles", description="how numbers become rows")
    column: str = _COLUMN
    buckets: int = Field(ge=2, le=1_000_000, description="number of buckets")


class TimePart(Section):
    """Hour of the day or weekday of the schema's time column."""

    encode: Literal["hour_of_day", "weekday"] = Field(description="part of the time, UTC")


IdField = Vocabulary | Hashed | Integers | Quantiles | TimePart

Transform = Literal["log1p", "minmax", "standard"]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class NumberField(Section):
    """A numeric input."""

    column: str = _COLUMN
    fill: float = Field(0.0, description="value of a missing number, before the transforms")
    transform: Annotated[list[Transform] | None, BeforeValidator(_one_or_many)] = Field(
        None,
        description="log1p: ln(1 + max(x, 0)); minmax: to [0, 1] by the training part's range, "
        "clipped; standard: mean 0, standard deviation 1 in the training part; [] leaves it; none: "
        "chosen by data.features",
    )
    bins: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="quantile bins that are ids besides, in a field NAME_bin; 0: none; none: "
        "chosen by data.features",
    )

    @field_validator("bins")
    @classmethod
    def _more_than_one(cls, bins: int | None) -> int | None:
        if bins == 1:
            raise ValueError("found 1, which tells nothing apart; write 0 for none, or 2 and more")
        return bins

    @model_validator(mode="after")
    def _one_scale_at_the_end(self) -> NumberField:
        if self.transform not in (None, [], ["log1p"], ["minmax"], ["standard"]) and (
            len(self.transform) != 2 or self.transform[0] != "log1p" or self.transform[1] == "log1p"
        ):
            raise ValueError(
                f"found the transforms {self.transform}; write one of them, or log1p and another"
            )
        return self


class Label(Section):
    """The label: a column of 0 and 1, or a number compared with a threshold."""

    column: str = Field(min_length=1, description="its column")
    at_least: float | None = Field(
        None, description="numbers from here on are 1, lower ones 0; none: the column has 0 and 1"
    )


class Time(Section):
    """When a sample was seen."""

    column: str = Field(min_length=1, description="its column")
    format: str = Field(
        "seconds", description="such as %Y-%m-%d %H:%M:%S, or seconds since 1970; always UTC"
    )
