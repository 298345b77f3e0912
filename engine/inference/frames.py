"""Frames to score: columns of any library's types as columns that a log can have."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow

from stampede.data import DataError
from stampede.data.formulas import parts_of_objects, text_of
from stampede.data.raw.nested import values_within

Frame = pd.DataFrame | pl.DataFrame | pyarrow.Table

_LISTS = (list, tuple, set, frozenset, np.ndarray, pd.Series, pl.Series)
_TIMES = (datetime.date, np.datetime64)  # a datetime is a date


def columns_of(frame: Frame, used: Set[str]) -> pl.DataFrame:
    """The used columns of a frame, and those that hold used values, such as `orders` `orders.item`.

    Values of different Python types in one column become text, whole numbers without a fraction.

    Raises:
        DataError: a column appears twice, or has values that no log can have; names the column.
    """
    names = frame.column_names if isinstance(frame, pyarrow.Table) else [*frame.columns]
    holding = {start for name in used - {*names} for start in _starts(name)}
    wanted = [name for name in names if isinstance(name, str) and name in used | holding]
    twice = next((name for name in wanted if wanted.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"the frame: has the column {twice!r} twice; rename or drop one of them")
    found = pl.DataFrame([_column(name, frame[name]) for name in wanted])
    texts = [column.name for column in found if column.dtype == pl.String]
    within = values_within(found.schema).keys() | parts_of_objects(texts).keys()
    telling = {start for name in within for start in _starts(name)} | used
    # A column without any value does not tell what is within it: that is missing.
    absent = [n for n in sorted(used - {*names} - within) if not {*_starts(n)}.isdisjoint(wanted)]
    columns = [name for name in wanted if name in telling]
    return found.select(*columns, *(pl.lit(None).alias(name) for name in absent))


def _starts(name: str) -> Iterator[str]:
    """Of `a.b.c`: `a.b` and `a`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _column(name: str, values: pd.Series | pl.Series | pyarrow.ChunkedArray) -> pl.Series:
    try:
        if isinstance(values, pyarrow.ChunkedArray):
            found = pl.Series(name, pl.from_arrow(values))
        elif isinstance(values, pd.Series):
            # Arrow would give the codes of periods.
            of_python = pd.CategoricalDtype | pd.PeriodDtype | pd.IntervalDtype
            is_own = isinstance(values.dtype, of_python) or values.dtype == object
            found = _of_objects(name, values.tolist()) if is_own else pl.from_pandas(values)
        else:
            found = _of_objects(name, values.to_list()) if values.dtype == pl.Object else values
        # Parquet has no such integers.
        return found.cast(pl.String if found.dtype == pl.Int128 else found.dtype).alias(name)
    except DataError:
        raise
    except (pyarrow.ArrowException, pl.exceptions.PolarsError, TypeError, ValueError) as failure:
        reason = str(failure).splitlines()[0]
        raise DataError(
            f"the frame: column {name!r}, stored as {getattr(values, 'dtype', values)}, cannot be "
            f"read ({reason}); convert it to text, numbers or times"
        ) from None


def _of_objects(name: str, values: Sequence[Any]) -> pl.Series:
    """A column of Python objects."""
    values = [None if _is_missing(value) else value for value in values]
    present = [value for value in values if value is not None]
    are_lists = {isinstance(value, _LISTS) for value in present}
    if present and all(isinstance(value, float | np.floating) for value in present):
        return pl.Series(name, [None if v is None else float(v) for v in values], pl.Float64)
    if present and all(isinstance(value, dict) for value in present):
        return pl.Series(name, pl.from_arrow(pyarrow.array(map(_struct, values))))
    if are_lists == {True}:
        inner = [one for value in map(_listed, present) for one in value]
        if inner and all(isinstance(one, dict) or _is_pair(one) for one in inner):
            lists = [value and [*map(_struct, value)] for value in map(_listed, values)]
            return pl.Series(name, pl.from_arrow(pyarrow.array(lists)))
        if inner and all(isinstance(one, float | np.floating) for one in inner):
            floats = [value and list(map(float, value)) for value in map(_listed, values)]
            return pl.Series(name, floats, dtype=pl.List(pl.Float64))
        # Their order is the log's, except of sets.
        lists = [value and [_text(name, one) for one in value] for value in map(_listed, values)]
        return pl.Series(name, lists, dtype=pl.List(pl.String))
    if are_lists == {True, False}:
        raise DataError(
            f"the frame: column {name!r} holds lists and single values; write lists in all rows or "
            "in none"
        )
    if present and all(isinstance(value, _TIMES) for value in present):
        return pl.Series(name, pd.Series(pd.to_datetime(pd.Series(values))))
    if present and all(isinstance(value, bool | np.bool_) for value in present):
        return pl.Series(name, [None if v is None else bool(v) for v in values], pl.Boolean)
    return pl.Series(name, [None if v is None else _text(name, v) for v in values], pl.String)


def _is_pair(value: Any) -> bool:
    """Whether a value is one of a map, as pandas reads them from Parquet."""
    return isinstance(value, tuple) and len(value) == 2


def _struct(value: Any) -> Any:
    """A dict, or a pair of a map as one, with None for what is missing within it."""
    if _is_pair(value):
        value = dict(zip(("key", "value"), value, strict=True))
    if isinstance(value, dict):
        return {key: None if _is_missing(one) else _struct(one) for key, one in value.items()}
    return value


def _listed(value: Any) -> list[Any] | None:
    return None if value is None else [one for one in value if not _is_missing(one)]


def _is_missing(value: Any) -> bool:
    if isinstance(value, float | np.floating | decimal.Decimal):
        return value != value
    return value is None or value is pd.NA or value is pd.NaT


def _text(name: str, value: Any) -> str:
    if (text := text_of(value)) is not None:
        return text
    raise DataError(
        f"the frame: column {name!r}: found {value!r:.80} of type {type(value).__name__}; write "
        "text, numbers, times, or lists of them"
    )
