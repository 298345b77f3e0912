"""Types of stored columns that serve a purpose."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from stampede.data.errors import DataError

# Beyond it a number is infinite once it is a float32.
LARGEST = 3.4e38


def is_numeric(kind: pl.DataType) -> bool:
    """Numbers, truth values, or text of them."""
    return kind.is_numeric() or kind in (pl.String, pl.Boolean, pl.Null)


def is_time(kind: pl.DataType) -> bool:
    """Dates and times, whole seconds, or text of them."""
    return (
        kind == pl.Date or isinstance(kind, pl.Datetime) or kind.is_integer() or kind == pl.String
    )


def is_scalar(kind: pl.DataType) -> bool:
    """Whatever has one text per cell."""
    return is_numeric(kind) or kind.is_temporal()


def is_list(kind: pl.DataType) -> bool:
    """Text, or lists of what has one text each."""
    inner = kind.inner if isinstance(kind, pl.List | pl.Array) else kind
    return is_scalar(inner)


def check_type(
    column: str, types: pl.Schema, purpose: str, serves: Callable[[pl.DataType], bool]
) -> None:
    """Refuse a column whose type does not serve its purpose.

    Raises:
        DataError: names the column and its type.
    """
    kind = types[column]
    if not serves(kind):
        raise DataError(f"column {column} is stored as {kind}, which is not {purpose}")
