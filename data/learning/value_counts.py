"""Counts the values of columns in bounded memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from stampede.data.learning import COUNT, VALUE
from stampede.data.schema.schema import Schema, Vocabulary

# Counts of fewer rows wait before they are merged.
_PENDING_ROWS = 200_000
_PARTITIONS = 32


class Distinct(NamedTuple):
    """The distinct values of a column, so that work on each value is done once."""

    values: pl.Series  # each value once, in any order; null is one if the column has nulls
    codes: np.ndarray  # `[n]` index of each row's value, of the narrowest unsigned type


def distinct_ids(frame: pl.DataFrame, schema: Schema) -> dict[str, Distinct]:
    """Distinct values of the single-valued vocabulary fields of typed rows, by name."""
    return {
        name: distinct(frame[name])
        for name, field in schema.ids.items()
        if isinstance(field, Vocabulary) and field.separator is None
    }


def distinct(texts: pl.Series) -> Distinct:
    """Distinct values of a String column; told apart by a 64-bit hash, like ids in `RowsOfIds`."""
    # Slow to import.
    import pandas as pd

    codes, hashes = pd.factorize(texts.hash().to_numpy())
    # Where each of them is, in Polars' type of an index, which needs no conversion.
    places = np.empty(len(hashes), np.uint32)
    places[codes] = np.arange(len(texts), dtype=np.uint32)
    return Distinct(texts[places], codes.astype(np.min_scalar_type(len(hashes))))


class ValueCounts:
    """Counts the values of several columns, a chunk at a time.

    Counts are one merged table and newer ones. When the newer ones have as many rows as the merged
    one, all are merged, so each row is merged a logarithmic number of times. Beyond a budget in
    bytes, the largest counts move to a folder, partitioned by a hash of the value, and are merged
    at the end, one partition after the other.

    Args:
        columns: what each column is counted as; columns of one name are counted together.

    Attributes:
        names: what is counted.
    """

    def __init__(self, columns: Mapping[str, str], budget: int, folder: Path) -> None:
        self._columns, self.names = columns, list(dict.fromkeys(columns.values()))
        names = self.names
        # The merged table of each name, and newer ones.
        self._tables: dict[str, list[pl.DataFrame]] = {name: [] for name in names}
        # Added up here, as asking Polars each time takes longer than counting.
        self._bytes = dict.fromkeys(names, 0)
        self._spilled = dict.fromkeys(names, 0)
        self._budget = budget
        self._folder = folder

    def add(self, chunk: pl.DataFrame, distinct: Mapping[str, Distinct]) -> None:
        """Count the values of some rows and of other `distinct` columns, without nulls.

        Lists count value by value.
        """
        columns = {n: _of_one_zero(chunk, n) for n in self._columns if n not in distinct}
        counted = chunk.select(
            (one.explode() if isinstance(chunk.schema[name], pl.List) else one)
            .drop_nulls()
            .value_counts(name=COUNT)
            .implode()
            .alias(name)
            for name, one in columns.items()
        )
        for column, name in self._columns.items():
            if column in distinct:
                values, codes = distinct[column]
                counts = pl.Series(COUNT, np.bincount(codes, minlength=len(values)))
                table = pl.DataFrame([values.alias(VALUE), counts])
                table = table.filter((counts > 0) & table[VALUE].is_not_null())
            else:
                table = counted[column][0].struct.unnest()
                table.columns = [VALUE, COUNT]
            if len(table):
                self._append(name, table)
            tables = self._tables[name]
            newer = sum(map(len, tables[1:]))
            if newer > _PENDING_ROWS and newer > len(tables[0]):
                self._append(name, self._release(name))
        if sum(self._bytes.values()) <= self._budget:
            return
        # Halve the memory: merge tables, then move the largest columns to disk.
        for name in sorted(self._bytes, key=self._bytes.__getitem__, reverse=True):
            if self._tables[name]:
                self._append(name, self._release(name))
            if sum(self._bytes.values()) <= self._budget // 2:
                return
            self._spill(name)

    def tables(self, name: str) -> Iterator[pl.DataFrame]:
        """The counts of a name, released from memory: tables of `value` and `count`.

        Each value appears once, in one of the tables.
        """
        if self._spilled[name]:
            self._spill(name)
            for part in range(_PARTITIONS):
                files = sorted((self._folder / name).glob(f"{part}-*.parquet"))
                if files:
                    yield _summed([pl.read_parquet(file, glob=False) for file in files])
            shutil.rmtree(self._folder / name)
        elif self._tables[name]:
            yield self._release(name)

    def _append(self, name: str, table: pl.DataFrame) -> None:
        self._tables[name].append(table)
        self._bytes[name] += int(table.estimated_size())

    def _release(self, name: str) -> pl.DataFrame:
        """Remove all tables of a name and return them as one."""
        found = _summed(self._tables[name])
        self._tables[name].clear()
        self._bytes[name] = 0
        return found

    def _spill(self, name: str) -> None:
        if not self._tables[name]:
            return
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        part = (pl.col(VALUE).hash(seed=1) % _PARTITIONS).alias("part")
        parts = self._release(name).with_columns(part).partition_by("part", as_dict=True)
        for (number,), rows in parts.items():
            path = folder / f"{number}-{self._spilled[name]:06d}.parquet"
            rows.drop("part").write_parquet(path, compression="lz4")
        self._spilled[name] += 1


def _summed(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """One table of several; the counts of several are Int64."""
    if len(tables) == 1:
        return tables[0]
    table = pl.concat([table.cast({COUNT: pl.Int64}) for table in tables]).lazy()
    # In half the time of the other engine.
    return table.group_by(VALUE).agg(pl.col(COUNT).sum()).collect(engine="streaming")


def _of_one_zero(chunk: pl.DataFrame, name: str) -> pl.Expr:
    """A column with 0.0 for -0.0: they are equal, and which of them stays would be by chance."""
    column = pl.col(name)
    if not chunk.schema[name].is_float():
        return column
    return pl.when(column == 0).then(pl.lit(0.0, chunk.schema[name])).otherwise(column)
