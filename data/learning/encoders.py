"""Rows of tables for the values of id fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import polars as pl

from stampede.data.formulas import bucket_rows
from stampede.data.learning.hashing import bucket
from stampede.data.learning.vocabulary import FIRST_ROW, MISSING_ROW, UNSEEN_ROW, RowsOfIds
from stampede.data.prepared.manifest import FieldEntry
from stampede.data.schema.columns import Hashed, IdField, Integers, Quantiles, TimePart

_PARTS = {"hour_of_day": 24, "weekday": 7}


class Encoder(NamedTuple):
    """A field's table, and the row of each value.

    Attributes:
        entry: the table.
        rows: of a Series of values, `[n]` int64.
    """

    entry: FieldEntry
    rows: Callable[[pl.Series], np.ndarray]


def vocabulary_encoder(name: str, values: pl.Series, multi: bool) -> Encoder:
    """Of ids with a row each; `values` String."""
    rows = RowsOfIds(values)
    entry = FieldEntry(
        name=name,
        rows=FIRST_ROW + rows.size,
        missing_row=MISSING_ROW,
        unseen_row=UNSEEN_ROW,
        multi=multi,
    )
    return Encoder(entry, rows)


def quantile_encoder(name: str, edges: list[float]) -> Encoder:
    """Of numbers cut at `edges`."""
    entry = FieldEntry(name=name, rows=len(edges) + 2, missing_row=0)
    return Encoder(entry, lambda numbers: bucket_rows(numbers, edges))


def fixed_encoder(name: str, field: IdField) -> Encoder:
    """Of a field for which nothing is learned. The row after the last is for a missing value."""
    multi = is_multi(field)
    if isinstance(field, Hashed):
        size = field.buckets
        row = lambda ids: bucket(ids, field.buckets, field.seed)  # noqa: E731
    elif isinstance(field, Integers):
        size, row = field.size, _as_int
    else:
        assert isinstance(field, TimePart)
        size, row = _PARTS[field.encode], _as_int
    entry = FieldEntry(name=name, rows=size + 1, missing_row=size, multi=multi)

    def rows(values: pl.Series) -> np.ndarray:
        found = row(values)
        if values.null_count():
            found[values.is_null().to_numpy()] = size
        return found

    return Encoder(entry, rows)


def is_multi(field: IdField) -> bool:
    """Whether a sample may have several ids of a field."""
    return not isinstance(field, Quantiles | TimePart) and field.separator is not None


def _as_int(values: pl.Series) -> np.ndarray:
    return values.fill_null(0).cast(pl.Int64).to_numpy().copy()
