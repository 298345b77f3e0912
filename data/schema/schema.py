"""The schema of a click log: its columns, and the inputs of a model made of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from stampede.settings import Section, Seed, SettingsError, read_yaml, sentences

# Names of fields and numbers become parts of the names of files, metrics and tables.
_FIELD_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
FieldName = Annotated[str, Field(pattern=_FIELD_NAME)]

# Of a table; torch counts its bytes in 63 bits.
MOST_ROWS = 2**48

_COLUMN = Field("", description="column it is made from; default: the column of the same name")
# One more row is for missing values.
_Rows = Annotated[int, Field(ge=1, lt=MOST_ROWS)]


class _ManyIds(Section):
    """Keys of fields that may be multi-valued."""

    column: str = _COLUMN
    separator: str | None = Field(
        None, min_length=1, description="text between the ids of a cell; none: one id per cell"
    )
    max_ids: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="keep only the first ids of a cell, at most this many; needs a separator",
    )

    @model_validator(mode="after")
    def _only_cells_of_many_are_cut(self) -> _ManyIds:
        if self.max_ids is not None and self.separator is None:
            raise ValueError("found max_ids without separator; write both or neither")
        return self


class Vocabulary(_ManyIds):
    """Each id of the training part gets a row."""

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
    """A hash of its text gives each id one of a fixed number of rows."""

    encode: Literal["hash"] = Field("hash", description="how ids become rows")
    buckets: _Rows = Field(description="rows that ids share")
    seed: Seed = Field(0, description="seed of the hash")


class Integers(_ManyIds):
    """Integers that are already rows: id i has row i."""

    encode: Literal["integer"] = Field("integer", description="how ids become rows")
    size: _Rows = Field(description="rows; ids are 0 to size - 1")


class Quantiles(Section):
    """A number cut into buckets with equal shares of the training part."""

    encode: Literal["quantiles"] = Field("quantiles", description="how numbers become rows")
    column: str = _COLUMN
    buckets: int = Field(ge=2, le=1_000_000, description="number of buckets")


class TimePart(Section):
    """Hour of the day or weekday of the schema's time column."""

    encode: Literal["hour_of_day", "weekday"] = Field(description="part of the time, UTC")


IdField = Vocabulary | Hashed | Integers | Quantiles | TimePart


def is_multi(field: IdField) -> bool:
    """Whether a sample may have several ids of a field."""
    return not isinstance(field, Quantiles | TimePart) and field.separator is not None


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
        "clipped; standard: mean 0, standard deviation 1 in the training part; [] changes "
        "nothing; none: chosen by data.features",
    )
    bins: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="also make an id field NAME_bin with this many quantile bins; 0: none; none: "
        "chosen by data.features",
    )

    @model_validator(mode="after")
    def _bins_and_one_scale_at_the_end(self) -> NumberField:
        if self.bins == 1:
            raise ValueError("found bins: 1; write 0 for none, or 2 or more")
        if self.transform not in (None, [], ["log1p"], ["minmax"], ["standard"]) and (
            len(self.transform) != 2 or self.transform[0] != "log1p" or self.transform[1] == "log1p"
        ):
            raise ValueError(
                f"found the transforms {self.transform}; write one of them, or log1p and another"
            )
        return self


class Label(Section):
    """The label: a column of 0 and 1, or a number with a threshold."""

    column: str = Field(min_length=1, description="its column")
    at_least: float | None = Field(
        None, description="label 1 for numbers of at least this; none: the column holds 0 and 1"
    )


class Time(Section):
    """The time of a sample."""

    column: str = Field(min_length=1, description="its column")
    format: str = Field(
        "seconds", description="such as %Y-%m-%d %H:%M:%S, or seconds since 1970; always UTC"
    )


def _names_alone(value: Any) -> Any:
    """Read `[C1, C2]`, and keys without values, as `{C1: {}, C2: {}}`."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        value = dict.fromkeys(value)
    if isinstance(value, dict):
        value = {name: {} if options is None else options for name, options in value.items()}
    return value


def _ids(value: Any) -> Any:
    """Fill in the default encoding, `vocabulary`."""
    value = _names_alone(value)
    for name, options in value.items() if isinstance(value, dict) else ():
        if isinstance(options, dict):
            value[name] = {"encode": "vocabulary", **options}
    return value


def _label(value: Any) -> Any:
    return {"column": value} if isinstance(value, str) else value


_Ids = Annotated[
    dict[str, Annotated[IdField, Field(discriminator="encode")]], BeforeValidator(_ids)
]


# How databases, R, pandas and spreadsheets write missing values.
MISSING = ["", "NA", "N/A", "n/a", "<NA>", "NaN", "nan", "NULL", "Null", "null", "None", "\\N", "-"]


class Schema(Section):
    """What the columns of a click log mean."""

    format: Literal["auto", "csv", "parquet"] = Field(
        "auto", description="auto: parquet by the file's suffix, else csv"
    )
    separator: str = Field(
        "auto",
        description="one character between columns of a csv file; auto: tab for .tsv and .txt, "
        "else comma",
    )
    quote: str = Field('"', description="character around cells with separators; empty: none")
    columns: list[str] = Field(
        [], description="names of the columns in order, if csv files have no header line"
    )
    missing: list[str] = Field(
        MISSING, min_length=1, description="texts of a cell that mean a missing value"
    )
    label: Annotated[Label | None, BeforeValidator(_label)] = Field(
        description="the label's column; none only for a log to score"
    )
    ids: _Ids = Field(min_length=1, description="id fields by name")
    numbers: Annotated[dict[str, NumberField], BeforeValidator(_names_alone)] = Field(
        {}, description="numeric inputs by name"
    )
    weight: str | None = Field(
        None, min_length=1, description="column of the samples' weights, 0 or more"
    )
    time: Time | None = Field(None, description="when a sample was seen")

    @model_validator(mode="after")
    def _columns_fit_together(self) -> Schema:
        if self.columns and len(set(self.columns)) != len(self.columns):
            raise ValueError("columns: a name appears twice; names must differ")
        if self.separator != "auto" and len(self.separator.encode()) != 1:
            raise ValueError(f"separator: found {self.separator!r}; write one character, or auto")
        if len(self.quote.encode()) > 1:
            raise ValueError(f"quote: found {self.quote!r}; write one character, or '' for none")
        for name in (*self.ids, *self.numbers):
            if not re.fullmatch(_FIELD_NAME, name):
                raise ValueError(
                    f"field {name!r}: write letters, digits, '_' and '-' only, and the column's "
                    "name after `column:`"
                )
        twice = sorted(set(self.ids) & set(self.numbers))
        if twice:
            raise ValueError(
                f"{twice[0]!r} is an id field and a number; rename one, with `column:`"
            )
        timed = [name for name, field in self.ids.items() if isinstance(field, TimePart)]
        if timed and self.time is None:
            raise ValueError(
                f"ids.{timed[0]}: encode: {self.ids[timed[0]].encode} needs the section `time`"
            )
        absent = sorted(self.used_columns() - set(self.columns)) if self.columns else []
        if absent:
            raise ValueError(
                f"column {absent[0]!r} is used but not in columns: {', '.join(self.columns)}"
            )
        return self

    def used_columns(self) -> set[str]:
        """Columns of the file that are read."""
        others = (self.label and self.label.column, self.weight, self.time and self.time.column)
        return {*self.sources().values(), *filter(None, others)}

    def numeric_columns(self) -> set[str]:
        """Columns of the file that are read as numbers only."""
        columns = self.sources()
        numbers = {columns[name] for name in self.numbers}
        texts = {columns[name] for name in columns if name in self.ids}
        numbers |= {self.label and self.label.column, self.weight}
        return numbers - texts - {None, self.time and self.time.column}

    def sources(self) -> dict[str, str]:
        """Column of each id field and number by name, except parts of the time."""
        fields = {**self.ids, **self.numbers}
        return {
            name: field.column or name
            for name, field in fields.items()
            if not isinstance(field, TimePart)
        }


def load_schema(path: Path) -> Schema:
    """Read and check a schema file.

    Raises:
        SettingsError: names each wrong key and what to write instead.
    """
    values = read_yaml(path, "write a schema as docs/schema.md shows")
    try:
        schema = Schema.model_validate(values)
    except ValidationError as failure:
        raise SettingsError(f"{path}:\n" + "\n".join(sentences(failure, Schema))) from None
    if schema.label is None:
        raise SettingsError(f"{path}:\n  label: not given; write the name of its column")
    return schema


# Criteo's and Avazu's logs, as distributed.
_CRITEO_NUMBERS = [f"I{i}" for i in range(1, 14)]
_CRITEO_IDS = [f"C{i}" for i in range(1, 27)]

CRITEO = Schema.model_validate(
    {
        "separator": "\t",
        "quote": "",
        "columns": ["label", *_CRITEO_NUMBERS, *_CRITEO_IDS],
        "label": "label",
        "numbers": _CRITEO_NUMBERS,
        "ids": _CRITEO_IDS,
    }
)

_AVAZU_IDS = [
    "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain",
    "app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type",
    "C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21",
]  # fmt: skip


def avazu(split_hour: bool) -> Schema:
    """Avazu's log, CSV with a header.

    Args:
        split_hour: replace `hour` (YYMMDDHH) by hour of the day and weekday. The CowClip paper's
            authors use it as an id, although no id of the training days recurs in later ones.
    """
    hours = {"hour_of_day": {"encode": "hour_of_day"}, "weekday": {"encode": "weekday"}}
    return Schema.model_validate(
        {
            "separator": ",",
            "label": "click",
            "ids": {**(hours if split_hour else {"hour": {}}), **dict.fromkeys(_AVAZU_IDS)},
            "time": {"column": "hour", "format": "%y%m%d%H"},
        }
    )
