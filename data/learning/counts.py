"""How often each value of a column occurs, in bounded memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

VALUE, COUNT = "value", "count"

# Tables of a column that are smaller than this wait to be merged.
_PENDING_ROWS = 200_000
_PARTITIONS = 32


class ValueCounts:
    """Counts of the values of several columns, a chunk at a time.

    A column's counts are one merged table and some younger ones. They are merged when the younger
    ones together have as many rows, so a row is merged a logarithmic number of times. Above a
    budget the largest columns go to disk, divided by a hash of the value, and are merged there,
    one part after the other, at the end.

    Args:
        columns: their names.
        budget: bytes of all tables in memory.
        folder: where counts go above it; made when needed.
    """

    def __init__(self, columns: Sequence[str], budget: int, folder: Path) -> None:
        self._tables: dict[str, list[pl.DataFrame]] = {name: [] for name in columns}
        self._budget = budget
        self._folder = folder
        self._spilled: dict[str, int] = dict.fromkeys(columns, 0)

    @property
    def spills(self) -> int:
        """How often a column went to disk."""
        return sum(self._spilled.values())

    def add(self, chunk: pl.DataFrame) -> None:
        """Count the values of some rows; null is no value, a list counts each of its values."""
        if not self._tables:
            return
        counted = chunk.select(
            _values(chunk, name).drop_nulls().value_counts(name=COUNT).implode().alias(name)
            for name in self._tables
        )
        for name, tables in self._tables.items():
            table = counted[name][0].struct.unnest()
            table.columns = [VALUE, COUNT]
            if len(table):
                tables.append(table)
            younger = sum(map(len, tables[1:]))
            if younger > max(_PENDING_ROWS, len(tables[0]) if tables else 0):
                self._merge(name)
        if self._bytes() > self._budget:
            self._shrink()

    def tables(self, name: str) -> Iterator[pl.DataFrame]:
        """A column's counts, released from memory: tables of `value` and `count`.

        Each value is in one table, once.
        """
        if self._spilled[name]:
            self._spill(name)
            for part in range(_PARTITIONS):
                files = sorted((self._folder / name).glob(f"{part}-*.parquet"))
                if files:
                    yield _summed([pl.read_parquet(file) for file in files])
            shutil.rmtree(self._folder / name)
        elif self._tables[name]:
            yield self._merge(name)
        self._tables[name] = []

    def _merge(self, name: str) -> pl.DataFrame | None:
        tables = self._tables[name]
        if not tables:
            return None
        self._tables[name] = []
        merged = _summed(tables) if len(tables) > 1 else tables[0]
        del tables
        self._tables[name] = [merged]
        return merged

    def _bytes(self) -> int:
        return sum(
            int(table.estimated_size()) for tables in self._tables.values() for table in tables
        )

    def _shrink(self) -> None:
        """Bring memory to half the budget: merge what can be merged, then the largest to disk."""
        sizes = {
            name: sum(int(table.estimated_size()) for table in tables)
            for name, tables in self._tables.items()
        }
        for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
            self._merge(name)
            if self._bytes() <= self._budget // 2:
                return
            self._spill(name)

    def _spill(self, name: str) -> None:
        table = self._merge(name)
        if table is None:
            return
        self._tables[name] = []
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        run = self._spilled[name]
        self._spilled[name] += 1
        part = (pl.col(VALUE).hash(seed=1) % _PARTITIONS).alias("part")
        for (number,), rows in (
            table.with_columns(part).partition_by("part", as_dict=True, include_key=False).items()
        ):
            rows.write_parquet(folder / f"{number}-{run:06d}.parquet", compression="lz4")


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
        .collect()
    )
