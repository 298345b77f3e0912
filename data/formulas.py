"""Formulas that make a model's inputs of a log's values.

An exported model carries this file with it (see `stampede.engine.inference.package`): it needs
polars and numpy, and nothing of stampede.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

_HOUR, _DAY, _WEEK = 3600, 86400, 7
# 1970-01-01 was a Thursday; Monday is weekday 0.
_THURSDAY = 3

# Row 0 of a table of buckets is for a missing number.
_FIRST_BUCKET = 1


def stripped(column: str, kind: pl.DataType) -> pl.Expr:
    """Text without blanks around it, as the csv parser reads numbers; null where none is left."""
    if kind != pl.String:
        return pl.col(column)
    text = pl.col(column).str.strip_chars()
    return pl.when(text != "").then(text)


def filled(value: pl.Expr, fill: float, transform: Sequence[str]) -> pl.Expr:
    """A number with missing values filled, and `ln(1 + max(x, 0))` where `log1p` is asked for."""
    value = value.fill_null(fill)
    return value.clip(lower_bound=0.0).log1p() if "log1p" in transform else value


def scaled(
    value: pl.Expr,
    transform: Sequence[str],
    low: float,
    high: float,
    mean: float,
    deviation: float,
) -> pl.Expr:
    """The network's input of a filled number: Float32.

    Args:
        value: see `filled`.
        transform: may hold `minmax` or `standard`.
        low, high, mean, deviation: of the training part's filled numbers.
    """
    if "minmax" in transform:
        width = high - low
        value = ((value - low) / (width if width > 0 else 1.0)).clip(0.0, 1.0)
    elif "standard" in transform:
        value = (value - mean) / (deviation if deviation > 0 else 1.0)
    return value.cast(pl.Float32)


def bucket_rows(numbers: pl.Series, edges: Sequence[float]) -> np.ndarray:
    """Row of each number cut at `edges`: `[n]` int64, 0 where it is missing."""
    values = numbers.to_numpy()
    rows = np.searchsorted(np.array(edges), values, side="left") + _FIRST_BUCKET
    if numbers.null_count():
        rows[numbers.is_null().to_numpy()] = 0
    return rows


def seconds_of_time(column: str, kind: pl.DataType, format: str) -> pl.Expr:
    """Seconds since 1970, UTC, of a column of times; null where they cannot be read.

    Args:
        format: of text, or `seconds`.
    """
    if kind.is_temporal():
        return pl.col(column).dt.epoch("s")
    if format == "seconds":
        return stripped(column, kind).cast(pl.Int64, strict=False)
    # Chrono takes no hour without minutes; the hour alone, as in Avazu, is a full hour.
    text = pl.col(column).cast(pl.String)
    if "%H" in format and "%M" not in format:
        text, format = text + ":00", format + ":%M"
    return text.str.strptime(pl.Datetime("us"), format, strict=False).dt.epoch("s")


def part_of_time(seconds: pl.Expr, part: str) -> pl.Expr:
    """`hour_of_day`, 0 to 23, or `weekday`, Monday is 0, of seconds since 1970."""
    if part == "hour_of_day":
        return seconds.mod(_DAY) // _HOUR
    return ((seconds // _DAY) + _THURSDAY).mod(_WEEK)


def id_texts(column: str, kind: pl.DataType, separator: str | None, max_ids: int | None) -> pl.Expr:
    """Ids as text, a list of them where a cell may hold several; an empty cell is null."""
    cells = pl.col(column)
    if separator is None:
        return cells.cast(pl.String)
    if isinstance(kind, pl.Array):
        cells = cells.arr.to_list()
    if isinstance(kind, pl.List | pl.Array):
        cells = cells.cast(pl.List(pl.String))
    else:
        cells = cells.cast(pl.String).str.split(separator)
    cells = cells.list.eval(pl.element().filter(pl.element() != ""))
    return cells if max_ids is None else cells.list.head(max_ids)


def flattened(cells: pl.Series) -> tuple[np.ndarray, pl.Series]:
    """Ids of cells that hold several, and how many each has, `[n]` int64.

    A cell without an id has one, null.
    """
    lengths = cells.list.len().fill_null(0).to_numpy().astype(np.int64)
    # Of an empty list, as of null, explode leaves one null.
    return np.maximum(lengths, 1), cells.explode()
