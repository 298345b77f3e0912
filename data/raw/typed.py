"""Rows with the types that the schema asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from stampede.data.errors import DataError
from stampede.data.formulas import id_texts, part_of_time, seconds_of_time, stripped
from stampede.data.raw.bad_rows import BadRow
from stampede.data.raw.column_types import (
    LARGEST,
    check_type,
    is_list,
    is_numeric,
    is_scalar,
    is_time,
)
from stampede.data.raw.rows import RawRows
from stampede.data.schema.columns import (
    Hashed,
    IdField,
    Integers,
    Label,
    Quantiles,
    Time,
    TimePart,
    Vocabulary,
)
from stampede.data.schema.schema import Schema

LABEL, WEIGHT, TIME, SPLIT = "#label", "#weight", "#time", "#split"


@dataclass(frozen=True)
class _Typed:
    """A typed column, and when a value of it is bad.

    Attributes:
        name: of the typed column.
        column: of the file.
        values: the column; an unparsable value is null.
        is_bad: of each row, from the raw and the typed column; null is not bad.
        remedy: what to write instead.
        without_bad: the column with bad values taken for missing ones, where it is an input of a
            model, for which these have a meaning.
    """

    name: str
    column: str
    values: pl.Expr
    is_bad: pl.Expr | None
    remedy: str
    without_bad: pl.Expr | None = None


def typed(
    raw: RawRows, schema: Schema, split_column: str | None, bad_values_are_missing: bool = False
) -> tuple[pl.DataFrame, np.ndarray, list[BadRow], Counter[str]]:
    """Typed columns of the good rows.

    Ids of vocabularies and hashes are String, or List(String) where a cell holds several; raw
    integers Int64 or List(Int64), numbers Float64, `#label` and `#weight` Float32, `#time` Int64
    seconds since 1970, `#split` String. Null is missing. What the schema lacks is not there.

    Args:
        split_column: a further column that is wanted as text.
        bad_values_are_missing: whether a bad value of an input is null, instead of its row bad.

    Returns:
        The columns, the numbers of their rows, the bad rows, and how many bad values are null by
        column of the file.

    Raises:
        DataError: a column of a Parquet file has a type that is of no use for its purpose.
    """
    try:
        columns = _columns(schema, split_column, raw.frame.schema)
    except DataError as failure:
        raise DataError(f"{raw.file}: {failure}") from None
    taken: Counter[str] = Counter()
    if bad_values_are_missing:
        columns, taken = _with_bad_as_null(raw.frame, columns)
    # Lazily, so that the values and what is bad of them are computed once.
    query = raw.frame.lazy().select(
        *(column.values.alias(column.name) for column in columns),
        *(
            column.is_bad.any().alias(f"?{column.name}")
            for column in columns
            if column.is_bad is not None
        ),
    )
    frame = query.collect()
    suspects = [
        c for c in columns if c.is_bad is not None and len(frame) and frame[f"?{c.name}"][0]
    ]
    frame = frame.select(column.name for column in columns)
    if not suspects:
        return frame, raw.numbers, [], taken
    masks = raw.frame.select(column.is_bad.alias(column.name) for column in suspects)
    masks = masks.fill_null(False)
    kept = ~masks.select(pl.any_horizontal(pl.all())).to_series().to_numpy()
    indices = np.flatnonzero(~kept)
    texts = dict(zip(indices.tolist(), raw.row_texts(indices.tolist()), strict=True))
    bad = []
    for column in suspects:
        for index in np.flatnonzero(masks[column.name].to_numpy()).tolist():
            found = raw.frame[column.column][index]
            shown = "nothing" if found is None else repr(found)
            line, remedy = int(raw.lines[index]), column.remedy
            if line == 1 and found == column.column:
                remedy += "; line 1 seems to be a header: delete it, or `columns` from the schema"
            bad.append(BadRow(raw.file, line, column.column, shown, remedy, texts[index]))
    return frame.filter(pl.Series(kept)), raw.numbers[kept], _first_of_each_line(bad), taken


def _with_bad_as_null(
    frame: pl.DataFrame, columns: list[_Typed]
) -> tuple[list[_Typed], Counter[str]]:
    """The columns, of whose bad values those of inputs are null, and how many these are."""
    found, taken = [], Counter()
    for column in columns:
        if column.without_bad is not None:
            count = frame.select(column.is_bad.fill_null(False).sum()).item()
            # A column of which several inputs are made counts once.
            taken[column.column] = max(taken[column.column], count)
            column = replace(column, values=column.without_bad, is_bad=None)
        found.append(column)
    return found, +taken


def _first_of_each_line(bad: list[BadRow]) -> list[BadRow]:
    return list({row.line: row for row in reversed(bad)}.values())


def _columns(schema: Schema, split_column: str | None, types: pl.Schema) -> list[_Typed]:
    columns = [] if schema.label is None else [_label(schema.label, types)]
    for name, field in schema.numbers.items():
        columns.append(_number(name, field.column or name, types))
    for name, field in schema.ids.items():
        columns.append(_ids(name, field, schema, types))
    if schema.weight is not None:
        columns.append(_weight(schema.weight, types))
    if schema.time is not None:
        columns.append(_time(TIME, schema.time, types))
    if split_column is not None:
        text = pl.col(split_column).cast(pl.String)
        columns.append(_Typed(SPLIT, split_column, text, None, ""))
    return columns


def _float(column: str, types: pl.Schema) -> pl.Expr:
    """Float64; null for an empty cell, and for what is no number."""
    return stripped(column, types[column]).cast(pl.Float64, strict=False)


def _is_bad(column: str, types: pl.Schema, is_good: pl.Expr) -> pl.Expr:
    """Where there is a value that is not good."""
    return stripped(column, types[column]).is_not_null() & ~is_good.fill_null(False)


def _label(label: Label, types: pl.Schema) -> _Typed:
    check_type(label.column, types, "the label", is_numeric)
    value = _float(label.column, types)
    if label.at_least is None:
        bad = ~value.is_in([0.0, 1.0]).fill_null(False)
        return _Typed(LABEL, label.column, value.cast(pl.Float32), bad, "write 0 or 1")
    bad = ~value.is_finite().fill_null(False)
    values = (value >= label.at_least).cast(pl.Float32)
    return _Typed(LABEL, label.column, values, bad, "write a number")


def _number(name: str, column: str, types: pl.Schema) -> _Typed:
    check_type(column, types, "a number", is_numeric)
    value = _float(column, types)
    bad = _is_bad(column, types, value.abs() <= LARGEST)
    remedy = f"write a finite number up to {LARGEST:.1e}, or nothing where it is missing"
    return _Typed(name, column, value, bad, remedy, pl.when(~bad).then(value))


def _weight(column: str, types: pl.Schema) -> _Typed:
    check_type(column, types, "a weight", is_numeric)
    value = _float(column, types)
    bad = ~value.is_between(0, LARGEST).fill_null(False)
    remedy = f"write a number from 0 to {LARGEST:.1e}"
    return _Typed(WEIGHT, column, value.cast(pl.Float32), bad, remedy)


def _time(name: str, time: Time, types: pl.Schema) -> _Typed:
    check_type(time.column, types, "a time", is_time)
    kind = types[time.column]
    seconds = seconds_of_time(time.column, kind, time.format)
    if kind.is_temporal():
        remedy = "write a time"
    elif time.format == "seconds":
        remedy = "write whole seconds since 1970"
    else:
        remedy = f"write a time as {time.format}"
    return _Typed(name, time.column, seconds, seconds.is_null(), remedy, seconds)


def _ids(name: str, field: IdField, schema: Schema, types: pl.Schema) -> _Typed:
    if isinstance(field, TimePart):
        seconds = _time(name, schema.time, types).values
        part = part_of_time(seconds, field.encode)
        # Bad times are told by the time column itself.
        return _Typed(name, schema.time.column, part, None, "")
    column = field.column or name
    if isinstance(field, Quantiles):
        return _number(name, column, types)
    if field.separator is None:
        check_type(column, types, "an id (lists need ids." + name + ".separator)", is_scalar)
    else:
        check_type(column, types, "ids", is_list)
    cells = id_texts(column, types[column], field.separator, field.max_ids)
    if isinstance(field, Integers):
        return _integers(name, column, field, cells, types)
    assert isinstance(field, Vocabulary | Hashed)
    return _Typed(name, column, cells, None, "")


def _integers(name: str, column: str, field: Integers, cells: pl.Expr, types: pl.Schema) -> _Typed:
    remedy = f"write whole numbers from 0 to {field.size - 1} (ids.{name}.size)"
    if field.separator is None:
        numbers = cells.str.strip_chars().cast(pl.Int64, strict=False)
        bad = _is_bad(column, types, numbers.is_between(0, field.size - 1))
        return _Typed(name, column, numbers, bad, remedy, pl.when(~bad).then(numbers))
    numbers = cells.list.eval(pl.element().str.strip_chars().cast(pl.Int64, strict=False))
    good = pl.element().is_between(0, field.size - 1).fill_null(False)
    bad = numbers.list.eval(~good).list.any().fill_null(False)
    return _Typed(name, column, numbers, bad, remedy, numbers.list.eval(pl.element().filter(good)))
