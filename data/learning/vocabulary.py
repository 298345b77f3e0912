"""Counts the values of columns in bounded memory, and gives ids their rows."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

from stampede.data.schema.schema import Schema, Vocabulary

VALUE, COUNT = "value", "count"

# The first rows of a table; the ids of the vocabulary follow.
MISSING_ROW, UNSEEN_ROW, FIRST_ROW = 0, 1, 2

# Counts of fewer rows wait before they are merged.
_PENDING_ROWS = 200_000
_PARTITIONS = 32

_KEY_BYTES = 8
_SEED = 0


class Distinct(NamedTuple):
    """The distinct values of a column, so that work on each value is done once.

    Attributes:
        values: each value once, in any order; null is one of them if the column has nulls.
        codes: `[n]` index of each row's value, of the narrowest unsigned type.
    """

    values: pl.Series
    codes: np.ndarray

    def take(self, mask: np.ndarray) -> Distinct:
        """The rows where `mask` is true; keeps all values."""
        return self if mask.all() else Distinct(self.values, self.codes[mask])

    def counts(self) -> np.ndarray:
        """Rows of each value."""
        return np.bincount(self.codes, minlength=len(self.values))


def distinct_ids(frame: pl.DataFrame, schema: Schema) -> dict[str, Distinct]:
    """Distinct values of the single-valued vocabulary fields of typed rows, by name."""
    return {
        name: distinct(frame[name])
        for name, field in schema.ids.items()
        if isinstance(field, Vocabulary) and field.separator is None
    }


def distinct(texts: pl.Series) -> Distinct:
    """Distinct values of a String column."""
    found = _of_short_texts(texts)
    if found is None:
        encoded = texts.to_arrow().dictionary_encode(null_encoding="encode")
        found = pl.Series(encoded.dictionary), encoded.indices.to_numpy()
    values, codes = found
    return Distinct(values.alias(texts.name), codes.astype(np.min_scalar_type(len(values))))


def _of_short_texts(texts: pl.Series) -> tuple[pl.Series, np.ndarray] | None:
    """Values and codes of texts of one length up to 8 bytes, as in the public logs.

    Compares them as integers, in a third of the time. None for other texts.
    """
    array = texts.to_arrow(compat_level=pl.CompatLevel.newest())
    # 16 bytes per text: 4 bytes of length, then, up to 12 bytes of it, the text and zeros.
    views = np.frombuffer(array.buffers()[1] or b"", dtype=np.uint32).reshape(-1, 4)
    views = views[array.offset : array.offset + len(array)]
    missing = texts.is_null().to_numpy() if texts.null_count() else np.False_
    lengths = views[:, 0]
    length = int(lengths.max(initial=0))
    if not 0 < length <= _KEY_BYTES or not ((lengths == length) | missing).all():
        return None
    keys = views[:, 1:3].copy().view(np.uint64).ravel()
    if ((keys == 0) & ~missing).any():
        return None  # A text of NUL bytes; here 0 stands for null.
    keys[missing] = 0
    codes, uniques = pd.factorize(keys)
    characters = np.ascontiguousarray(uniques.view(np.uint8).reshape(-1, _KEY_BYTES)[:, :length])
    offsets = np.arange(0, length * len(uniques) + 1, length, dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(characters)]
    values = pl.Series(pa.Array.from_buffers(pa.large_string(), len(uniques), buffers))
    return values.set(pl.Series(uniques == 0), None), codes


class ValueCounts:
    """Counts the values of several columns, a chunk at a time.

    A column's counts are one merged table and newer ones. When the newer ones have as many rows as
    the merged one, all are merged, so each row is merged a logarithmic number of times. Beyond a
    budget in bytes, the largest columns move to a folder, partitioned by a hash of the value, and
    are merged at the end, one partition after the other.
    """

    def __init__(self, columns: Sequence[str], budget: int, folder: Path) -> None:
        self._tables = {name: _Tables() for name in columns}
        self._budget = budget
        self._folder = folder
        self._spilled: dict[str, int] = dict.fromkeys(columns, 0)

    def add(self, chunk: pl.DataFrame, distinct: Mapping[str, Distinct] | None = None) -> None:
        """Count the values of some rows and of other `distinct` columns, without nulls.

        Lists count value by value.
        """
        if not self._tables:
            return
        distinct = distinct or {}
        counted = chunk.select(
            _values(chunk, name).drop_nulls().value_counts(name=COUNT).implode().alias(name)
            for name in self._tables
            if name not in distinct
        )
        for name, tables in self._tables.items():
            if name in distinct:
                counts = pl.Series(COUNT, distinct[name].counts())
                table = pl.DataFrame([distinct[name].values.alias(VALUE), counts])
                table = table.filter((counts > 0) & table[VALUE].is_not_null())
            else:
                table = counted[name][0].struct.unnest()
                table.columns = [VALUE, COUNT]
            if len(table):
                tables.append(table)
            if tables.newer_rows > max(_PENDING_ROWS, tables.merged_rows):
                tables.merge()
        if self._bytes() > self._budget:
            self._shrink()

    def tables(self, name: str) -> Iterator[pl.DataFrame]:
        """A column's counts, released from memory: tables of `value` and `count`.

        Each value appears once, in one of the tables.
        """
        if self._spilled[name]:
            self._spill(name)
            for part in range(_PARTITIONS):
                files = sorted((self._folder / name).glob(f"{part}-*.parquet"))
                if files:
                    yield _summed([pl.read_parquet(file) for file in files])
            shutil.rmtree(self._folder / name)
        else:
            table = self._tables[name].release()
            if table is not None:
                yield table

    def _bytes(self) -> int:
        return sum(tables.bytes for tables in self._tables.values())

    def _shrink(self) -> None:
        """Halve the memory: merge tables, then move the largest columns to disk."""
        sizes = {name: tables.bytes for name, tables in self._tables.items()}
        for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
            self._tables[name].merge()
            if self._bytes() <= self._budget // 2:
                return
            self._spill(name)

    def _spill(self, name: str) -> None:
        table = self._tables[name].release()
        if table is None:
            return
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        run = self._spilled[name]
        self._spilled[name] += 1
        part = (pl.col(VALUE).hash(seed=1) % _PARTITIONS).alias("part")
        for (number,), rows in (
            table.with_columns(part).partition_by("part", as_dict=True, include_key=False).items()
        ):
            rows.write_parquet(folder / f"{number}-{run:06d}.parquet", compression="lz4")


class _Tables:
    """Tables of one column, the merged one first.

    Attributes:
        merged_rows: rows of the merged table.
        newer_rows: rows of the others.
        bytes: of all; added up here, as asking Polars each time takes longer than counting.
    """

    def __init__(self) -> None:
        self._tables: list[pl.DataFrame] = []
        self.merged_rows = self.newer_rows = self.bytes = 0

    def append(self, table: pl.DataFrame) -> None:
        if self._tables:
            self.newer_rows += len(table)
        else:
            self.merged_rows = len(table)
        self._tables.append(table)
        self.bytes += int(table.estimated_size())

    def merge(self) -> None:
        if len(self._tables) > 1:
            self.append(self.release())

    def release(self) -> pl.DataFrame | None:
        """Remove all tables and return them as one; None if there are no tables."""
        tables = self._tables
        self._tables, self.merged_rows, self.newer_rows, self.bytes = [], 0, 0, 0
        return _summed(tables) if len(tables) > 1 else next(iter(tables), None)


def _values(chunk: pl.DataFrame, name: str) -> pl.Expr:
    column = pl.col(name)
    return column.explode() if isinstance(chunk.schema[name], pl.List) else column


def _summed(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """One table of several; a count is Int64."""
    return (
        pl.concat([table.cast({COUNT: pl.Int64}) for table in tables])
        .lazy()
        .group_by(VALUE)
        .agg(pl.col(COUNT).sum())
        .collect(engine="streaming")  # in half the time of the other engine
    )


def vocabulary(counts: Iterable[pl.DataFrame], field: Vocabulary) -> pl.DataFrame:
    """The ids that get a row: most frequent first, ties in the order of their text.

    Args:
        counts: tables of `value` and `count`; each value in one of them.

    Returns:
        `value` String and `count` Int64; the id at index i has row `FIRST_ROW + i`.
    """
    kept = pl.DataFrame(schema={VALUE: pl.String, COUNT: pl.Int64})
    for table in counts:
        table = table.select(pl.col(VALUE), pl.col(COUNT).cast(pl.Int64))
        kept = pl.concat([kept, table.filter(pl.col(COUNT) >= field.min_count)])
        if field.max_size is not None and len(kept) > 2 * field.max_size:
            kept = _sorted(kept).head(field.max_size)
    kept = _sorted(kept)
    return kept if field.max_size is None else kept.head(field.max_size)


def _sorted(table: pl.DataFrame) -> pl.DataFrame:
    return table.sort([COUNT, VALUE], descending=[True, False])


def read_vocabulary(path: Path, columns: Iterable[str] = (VALUE,)) -> pl.DataFrame:
    """Columns of a vocabulary's file, in the order of the rows of its ids.

    Raises:
        OSError, ValueError: it is absent or damaged.
    """
    try:
        return pl.read_parquet(path, columns=[*columns], glob=False)
    # Damage that Polars does not detect makes it panic, and a panic is not an Exception.
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as failure:
        raise ValueError(f"{path.name} cannot be read ({failure!s:.100})") from None


def hashed(frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """Typed rows with hashes in place of the ids of multi-valued vocabulary fields."""
    return frame.with_columns(
        pl.col(name).list.eval(pl.element().hash(_SEED))
        for name, field in schema.ids.items()
        if isinstance(field, Vocabulary) and field.separator is not None
    )


def hashes(ids: pl.Series) -> pl.Series:
    """A 64-bit hash of each id of a vocabulary; null stays null."""
    return ids.hash(_SEED).set(ids.is_null(), None)


class RowsOfIds:
    """Finds the row of an id.

    It keeps a 64-bit hash of each id, not the text. No two ids of the vocabulary share a hash; an
    unseen id shares one with a probability of size / 2^64.

    Args:
        values: String, the vocabulary; each id once.

    Attributes:
        takes_hashes: whether it accepts `hashes` in place of texts. False if two ids of the
            vocabulary had the same hash, so that another seed is used.
    """

    def __init__(self, values: pl.Series) -> None:
        self.size = len(values)
        self._seed = _SEED
        self._index = pd.Index(values.hash(self._seed).to_numpy())
        while not self._index.is_unique:
            self._seed += 1
            self._index = pd.Index(values.hash(self._seed).to_numpy())
        self.takes_hashes = self._seed == _SEED

    def __call__(self, ids: pl.Series) -> np.ndarray:
        """Row of each id, String or its hash, or null: `[n]` int64."""
        hashes = ids.fill_null(0) if ids.dtype == pl.UInt64 else ids.hash(self._seed)
        # Ids that are not in the index get -1, which becomes UNSEEN_ROW.
        rows = self._index.get_indexer(hashes.to_numpy()) + FIRST_ROW
        if ids.null_count():
            rows[ids.is_null().to_numpy()] = MISSING_ROW
        return rows
