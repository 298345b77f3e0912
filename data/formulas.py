"""Formulas that make a model's inputs of a log's values.

A copy of this file goes with every exported model (see `stampede.engine.inference.packaging`): it
needs polars and numpy, and nothing of stampede.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

HOUR, DAY, WEEK = 3600, 86400, 7
# 1970-01-01 was a Thursday; Monday is weekday 0.
THURSDAY = 3

# Row 0 of a table of buckets is for a missing number.
_FIRST_BUCKET = 1

_FNV_OFFSET, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


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
        return seconds.mod(DAY) // HOUR
    return ((seconds // DAY) + THURSDAY).mod(WEEK)


def id_texts(
    column: str,
    kind: pl.DataType,
    separator: str | None,
    max_ids: int | None,
    missing: Sequence[str],
) -> pl.Expr:
    """Ids as text, a list of them where a cell may hold several; an empty cell is null.

    Args:
        missing: texts that are no id among several; a cell that is one of them is null already.
    """
    cells = pl.col(column)
    if separator is None:
        return cells.cast(pl.String)
    if isinstance(kind, pl.Array):
        cells = cells.arr.to_list()
    if isinstance(kind, pl.List | pl.Array):
        cells = cells.cast(pl.List(pl.String))
    else:
        cells = cells.cast(pl.String).str.split(separator)
    cells = cells.list.eval(pl.element().filter(~pl.element().is_in(["", *missing])))
    return cells if max_ids is None else cells.list.head(max_ids)


def flattened(cells: pl.Series) -> tuple[np.ndarray, pl.Series]:
    """Ids of cells that hold several, and how many each has, `[n]` int64.

    A cell without an id has one, null.
    """
    lengths = cells.list.len().fill_null(0).to_numpy().astype(np.int64)
    # Of an empty list, as of null, explode leaves one null.
    return np.maximum(lengths, 1), cells.explode()


def bucket(ids: pl.Series, buckets: int, seed: int) -> np.ndarray:
    """A bucket for each text, 0 to `buckets - 1`: `[n]` int64; null gets any.

    The hash is the same in every version and on every machine: FNV-1a over the UTF-8 bytes, from a
    start that depends on the seed, then the finalizer of splitmix64, since the low bits of FNV
    alone are those of the last characters.
    """
    # Polars' own hash may change with its version, and with it the rows of a trained table.
    ids = ids.fill_null("")
    distinct = ids.unique()
    position = ids.replace_strict(
        distinct, pl.int_range(len(distinct), eager=True), return_dtype=pl.Int64
    )
    hashes = stable_hashes(distinct, seed)
    return (hashes % np.uint64(buckets)).astype(np.int64)[position.to_numpy().astype(np.int64)]


def stable_hashes(texts: pl.Series, seed: int = 0) -> np.ndarray:
    """A hash of each text that is the same in every version: `[n]` uint64, see `bucket`."""
    return _splitmix(_fnv(texts, seed))


def _fnv(texts: pl.Series, seed: int) -> np.ndarray:
    data = np.frombuffer("".join(texts.to_list()).encode(), dtype=np.uint8)
    lengths = texts.str.len_bytes().to_numpy().astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    start = _splitmix(np.array([seed], dtype=np.uint64)) ^ _FNV_OFFSET
    hashes = np.full(len(texts), start[0], dtype=np.uint64)
    # Longest first: the texts with a byte at a place are then the first ones.
    order = np.argsort(-lengths, kind="stable")
    starts, sorted_lengths = starts[order], lengths[order]
    for place in range(int(sorted_lengths[0]) if len(order) else 0):
        longer = np.searchsorted(-sorted_lengths, -place, side="left")
        hashes[:longer] = (hashes[:longer] ^ data[starts[:longer] + place]) * _FNV_PRIME
    found = np.empty_like(hashes)
    found[order] = hashes
    return found


def _splitmix(hashes: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))
