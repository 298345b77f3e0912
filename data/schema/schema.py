"""The schema of a click log, and its YAML form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from stampede.data.prepared.manifest import FIELD_NAME
from stampede.data.schema.columns import IdField, Label, NumberField, Time, TimePart
from stampede.settings import Section, SettingsError, read_yaml, sentences


def _names_alone(value: Any) -> Any:
    """`[C1, C2]` is `{C1: {}, C2: {}}`, and so is a key without a value."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        value = dict.fromkeys(value)
    if isinstance(value, dict):
        value = {name: {} if options is None else options for name, options in value.items()}
    return value


def _ids(value: Any) -> Any:
    """Encoding `vocabulary` where none is given."""
    value = _names_alone(value)
    if isinstance(value, dict):
        value = {
            name: {"encode": "vocabulary", **options} if isinstance(options, dict) else options
            for name, options in value.items()
        }
    return value


def _label(value: Any) -> Any:
    return {"column": value} if isinstance(value, str) else value


_Ids = Annotated[
    dict[str, Annotated[IdField, Field(discriminator="encode")]], BeforeValidator(_ids)
]


# What databases, R, pandas and spreadsheets write for a missing value.
MISSING = ["", "NA", "N/A", "n/a", "<NA>", "NaN", "nan", "NULL", "Null", "null", "None", "\\N", "-"]


class Schema(Section):
    """What the columns of a click log mean."""

    format: Literal["auto", "csv", "parquet"] = Field(
        "auto", description="auto: parquet by the file's suffix, else csv"
    )
    separator: str = Field(
        "auto",
        description="one character between the columns of a csv file; auto: tab for .tsv and .txt, "
        "else comma",
    )
    quote: str = Field('"', description="character around cells with separators; empty: none")
    columns: list[str] = Field(
        [], description="names of the columns in order, where csv files have no header line"
    )
    missing: list[str] = Field(
        MISSING, min_length=1, description="texts of a cell that mean that the value is missing"
    )
    label: Annotated[Label | None, BeforeValidator(_label)] = Field(
        description="the label's column; none only where samples are scored"
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
            raise ValueError("columns: a name stands twice; names must differ")
        if self.separator != "auto" and len(self.separator.encode()) != 1:
            raise ValueError(f"separator: found {self.separator!r}; write one character, or auto")
        if len(self.quote.encode()) > 1:
            raise ValueError(f"quote: found {self.quote!r}; write one character, or '' for none")
        for name in (*self.ids, *self.numbers):
            if not re.fullmatch(FIELD_NAME, name):
                raise ValueError(
                    f"field {name!r}: write letters, digits, '_' and '-' only, and the column's "
                    "name after `column:`"
                )
        twice = sorted(set(self.ids) & set(self.numbers))
        if twice:
            raise ValueError(
                f"{twice[0]!r} is an id field and a number; give one another name, with `column:`"
            )
        timed = [name for name, field in self.ids.items() if isinstance(field, TimePart)]
        if timed and self.time is None:
            raise ValueError(f"ids.{timed[0]}: a part of the time needs the section `time`")
        absent = sorted(self.used_columns() - set(self.columns)) if self.columns else []
        if absent:
            raise ValueError(
                f"column {absent[0]!r} is used but not among columns: {', '.join(self.columns)}"
            )
        return self

    def used_columns(self) -> set[str]:
        """Columns of the file that anything is made of."""
        others = (self.label and self.label.column, self.weight, self.time and self.time.column)
        return {*self.sources().values(), *(column for column in others if column)}

    def numeric_columns(self) -> set[str]:
        """Columns of the file whose cells are read as numbers only."""
        columns = self.sources()
        numbers = {columns[name] for name in self.numbers}
        numbers |= {self.label.column} if self.label else set()
        numbers |= {self.weight} if self.weight else set()
        texts = {columns[name] for name in columns if name in self.ids}
        return numbers - texts - {self.time.column if self.time else ""}

    def sources(self) -> dict[str, str]:
        """Column of each id field and number, by name; fields made of the time are not there."""
        fields = {**self.ids, **self.numbers}
        return {
            name: field.column or name
            for name, field in fields.items()
            if not isinstance(field, TimePart)
        }


def load_schema(path: Path) -> Schema:
    """Read and check a schema file.

    Raises:
        SettingsError: what is wrong, key by key, and what to write instead.
    """
    values = read_yaml(path, "write a schema as docs/schema.md shows")
    try:
        schema = Schema.model_validate(values)
    except ValidationError as failure:
        raise SettingsError(f"{path}:\n" + "\n".join(sentences(failure, Schema))) from None
    if schema.label is None:
        raise SettingsError(f"{path}:\n  label: found nothing; write the name of its column")
    return schema
