"""The columns of a log with the types of its schema: labels, numbers, ids, weights and times."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stampede.data.errors import DataError
from stampede.data.formulas import (
    LARGEST,
    UNITS,
    Ids,
    Typed,
    number_of,
    part_of_time,
    stripped,
    typed_ids,
    typed_number,
    typed_time,
    typed_weights,
    written_alike,
)
from stampede.data.raw.nested import values_within
from stampede.data.schema.schema import (
    IdField,
    Integers,
    Label,
    Quantiles,
    Schema,
    TimePart,
    column_of_weights,
    number_as_text,
)

LABEL, WEIGHT, TIME, SPLIT = "#label", "#weight", "#time", "#split"


def label_column(goal: str) -> str:
    """Name of the typed column of a goal's labels; a single label has the goal ""."""
    return f"{LABEL}:{goal}" if goal else LABEL


def typed_columns(schema: Schema, split_column: str | None, types: pl.Schema) -> dict[str, Typed]:
    """The typed columns of a schema by name, see `Chunk`; `types` are those of the file's columns.

    Raises:
        DataError: a column's type does not serve its purpose.
    """
    columns = {}
    for goal, label in schema.label.items():
        columns[label_column(goal)] = typed_label(label, types, goal)
    for name, field in schema.numbers.items():
        columns[name] = _number(field.column or name, types)
    for name, field in schema.ids.items():
        columns[name] = _ids(name, field, schema, types)
        if field.weights is not None:
            columns[column_of_weights(name)] = _weights(name, field, schema, types)
    if schema.weight is not None:
        value = _float(schema.weight, types)
        bad = ~value.is_between(0, LARGEST).fill_null(False)
        remedy = f"write a number from 0 to {LARGEST:.1e}"
        columns[WEIGHT] = Typed(schema.weight, value.cast(pl.Float32), bad, remedy)
    if schema.time is not None:
        columns[TIME] = _time(schema, types)
    if split_column is not None:
        _check_type(split_column, types, "text", is_text(types[split_column]))
        columns[SPLIT] = Typed(split_column, pl.col(split_column).cast(pl.String))
    return columns


# Texts of labels, in any case.
_YES, _NO = ["true", "yes", "t", "y"], ["false", "no", "f", "n"]


def typed_label(label: Label, types: pl.Schema, goal: str = "") -> Typed:
    """A column of labels: 0, 1, a soft label between them, or -1, which `Labels` turns into 0.

    An empty cell is bad, but that of one of several goals is null: its label is missing.
    """
    column, kind = label.column, types[label.column]
    if label.positive:
        _check_type(column, types, "a label", is_text(kind))
        text = pl.col(column).cast(pl.String)
        # As the cells are.
        positive = written_alike(pl.Series(label.positive, dtype=pl.String))[0].to_list()
        value, bad, remedy = text.is_in(positive), text.is_null(), "write a value"
    elif label.at_least is not None:
        value = _float(column, types)
        bad = ~value.is_finite().fill_null(False)
        value, remedy = value >= float(np.float32(label.at_least)), "write a number"
    else:
        value = _float(column, types)
        if kind == pl.String:
            word = pl.col(column).str.strip_chars().str.to_lowercase()
            is_word = pl.when(word.is_in(_YES)).then(1.0).when(word.is_in(_NO)).then(0.0)
            value = pl.coalesce(value, is_word)
        bad = ~(value.is_between(0.0, 1.0) | (value == -1.0)).fill_null(False)
        remedy = partial(_remedy_of_label, column=column, goal=goal)
    if goal:
        bad = bad & stripped(column, kind).is_not_null()
    return Typed(column, value.cast(pl.Float32), bad, remedy)


def _remedy_of_label(value: Any, column: str, goal: str) -> str:
    """What to write instead of a bad label."""
    if value is None:
        return "write 0 or 1"
    is_text = isinstance(value, str)
    shown = json.dumps(value, ensure_ascii=False) if is_text else number_as_text(value)
    key = goal or "label"
    rules = [f"`{key}: {{column: {column}, positive: [{shown}]}}` in the schema if it is a click"]
    if not isinstance(value, str):
        rules.append(f"`{key}: {{column: {column}, at_least: {shown}}}`")
    return f"write 0 or 1, or {', or '.join(rules)}"


class Labels:
    """Turns labels -1 of a goal into 0; refuses them beside labels other than 1."""

    def __init__(self, goal: str, label: Label) -> None:
        self._name, self._label = label_column(goal), label
        self._has_minus, self._other = False, None

    def checked(self, frame: pl.DataFrame, file: Path) -> pl.DataFrame:
        """Rows with labels from 0 to 1."""
        if self._label.positive or self._label.at_least is not None:
            return frame
        label = frame[self._name]
        is_minus = label == -1
        others = label.filter(~is_minus & (label != 1))
        self._note(bool(is_minus.any()), others[0] if len(others) else None, file)
        return frame.with_columns(label.set(is_minus, 0.0)) if is_minus.any() else frame

    def add(self, other: Labels, file: Path) -> None:
        """Note what was found in a file that another process has read."""
        self._note(other._has_minus, other._other, file)

    def _note(self, has_minus: bool, other: float | None, file: Path) -> None:
        self._has_minus |= has_minus
        self._other = other if self._other is None else self._other
        if self._has_minus and self._other is not None:
            column = self._label.column
            raise DataError(
                f"{file}: column {column}: found labels -1 and {self._other:g}, so it is not clear "
                f"which of them are clicks; write `label: {{column: {column}, positive: [1]}}` in "
                "the schema, or other values"
            )


def _float(column: str, types: pl.Schema) -> pl.Expr:
    """Float64, see `number_of`; null for empty cells and for text that is not a number."""
    _check_type(column, types, "a number", _is_numeric(types[column]))
    return number_of(column, types[column])


def _number(column: str, types: pl.Schema) -> Typed:
    _check_type(column, types, "a number", _is_numeric(types[column]))
    return typed_number(column, types[column])


def _time(schema: Schema, types: pl.Schema) -> Typed:
    column, format = schema.time.column, schema.time.format
    kind = types[column]
    # A float32 is too coarse: it has a value every two minutes.
    serves = kind in (pl.Date, pl.Datetime, pl.String) or kind.is_integer()
    if format in UNITS:
        serves |= kind == pl.Float64 or kind.is_decimal()
    _check_type(column, types, "a time", serves)
    return typed_time(column, kind, format)


def _ids(name: str, field: IdField, schema: Schema, types: pl.Schema) -> Typed:
    if isinstance(field, TimePart):
        # Bad times are reported for the time column itself.
        time = _time(schema, types)
        return Typed(time.column, part_of_time(time.values, field.encode))
    column = field.column or name
    if isinstance(field, Quantiles):
        return _number(column, types)
    kind, purpose = types[column], f"an id (lists need ids.{name}.separator)"
    if field.separator is not None:
        kind, purpose = of_one(kind), "ids"
    _check_type(column, types, purpose, is_text(kind))
    return typed_ids(_ids_of(name, field, schema), types[column])


def _weights(name: str, field: IdField, schema: Schema, types: pl.Schema) -> Typed:
    """The weights of a field's ids."""
    _check_type(
        field.weights, types, "a list of numbers", _is_numeric(of_one(types[field.weights]))
    )
    ids = _ids_of(name, field, schema)
    return typed_weights(field.weights, types[field.weights], ids, types[ids.column])


def _ids_of(name: str, field: IdField, schema: Schema) -> Ids:
    size = field.size if isinstance(field, Integers) else None
    return Ids(
        column=field.column or name,
        separator=field.separator,
        missing=schema.missing,
        max_ids=field.max_ids,
        keep=field.keep,
        size=size,
        size_key=f" (ids.{name}.size)",
    )


def of_one(kind: pl.DataType) -> pl.DataType:
    """The type of one of the values of a cell."""
    return kind.inner if isinstance(kind, pl.List | pl.Array) else kind


def _is_numeric(kind: pl.DataType) -> bool:
    return kind.is_numeric() or kind in (pl.String, pl.Boolean, pl.Null)


def is_text(kind: pl.DataType) -> bool:
    """Whether all values can be written as text."""
    return _is_numeric(kind) or kind in (pl.Date, pl.Datetime, pl.Time)


def _check_type(column: str, types: pl.Schema, purpose: str, serves: bool) -> None:
    """Refuse a column whose type does not serve its purpose."""
    if not serves:
        every = [name for name in values_within(types) if name.startswith(f"{column}.")]
        within = [n for n in every if not any(other.startswith(f"{n}.") for other in every)]
        remedy = " or ".join(within[:5]) or "another column"
        raise DataError(
            f"column {column} is stored as {types[column]}, which is not {purpose}; convert it, or "
            f"name {remedy} in the schema"
        )
