"""Sorts counted values of which only some fit into memory, in files that are merged."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path

import polars as pl
import pyarrow
import pyarrow.parquet as pq

from stampede.data.learning import COUNT, VALUE

# Values that are sorted in memory; of more, sorted files are merged.
_MOST_IN_MEMORY = 4_000_000

# Rows of all files together that are in memory while they are merged, and half as many again.
_MERGED_ROWS = 1 << 20

# Rows of a file that are written or read together.
_ROWS_OF_A_PIECE = 1 << 18

# What Polars, PyArrow and damage that they do not detect raise; a panic is not an Exception.
UNREADABLE = (pl.exceptions.PolarsError, pl.exceptions.PanicException, pyarrow.ArrowException)

# Of ids.
COUNTED = pl.DataFrame(schema={VALUE: pl.String, COUNT: pl.Int64})


class Sorting:
    """Sorts counted values, with at most some millions of them in memory.

    Args:
        folder: for what does not fit into memory, empty or not there.
        by: the columns that decide, and whether each of them descends.
        empty: a table like those to come.
    """

    def __init__(self, folder: Path, by: Mapping[str, bool], empty: pl.DataFrame = COUNTED) -> None:
        self._folder, self._by, self._empty = folder, dict(by), empty
        shutil.rmtree(folder, ignore_errors=True)
        self._files: list[Path] = []
        self._tables = [empty]
        self._rows = 0

    def add(self, table: pl.DataFrame) -> None:
        """Take more of them: a table of `value` and `count`."""
        self._tables.append(table.select(VALUE, pl.col(COUNT).cast(pl.Int64)))
        self._rows += len(table)
        if self._rows > _MOST_IN_MEMORY:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files.append(self._folder / f"{len(self._files)}.parquet")
            write_pieces(self._files[-1], [self._in_memory()], self._empty)
            self._tables, self._rows = [self._empty], 0

    def pieces(self) -> Iterator[pl.DataFrame]:
        """All of them in order, some at a time, as often as asked."""
        self._tables = [self._in_memory()]
        if not self._files:
            yield self._tables[0]
            return
        rows = min(_ROWS_OF_A_PIECE, _MERGED_ROWS // len(self._files))
        of_files = (read_pieces(file, rows, self._empty) for file in self._files)
        sources = [self._tables[0].iter_slices(rows), *of_files]
        waiting = [self._empty] * len(sources)
        while True:
            both = zip(waiting, sources, strict=True)
            # Before a piece is empty: what may come next would wait for its few last rows.
            waiting = [
                table if len(table) > rows // 2 else pl.concat([table, next(source, self._empty)])
                for table, source in both
            ]
            begun = [table for table in waiting if len(table)]
            if not begun:
                return
            # Nothing that is still to be read comes before the first of their last rows.
            is_due = self._not_after(self._sorted(pl.concat([one.tail(1) for one in begun])))
            yield self._sorted(pl.concat([table.filter(is_due) for table in begun]))
            waiting = [table.filter(~is_due) for table in waiting]

    def _in_memory(self) -> pl.DataFrame:
        return self._sorted(pl.concat(self._tables))

    def _sorted(self, table: pl.DataFrame) -> pl.DataFrame:
        by, descending = list(self._by), list(self._by.values())
        if not self._by.get(COUNT):
            return table.sort(by, descending=descending)
        # Most ids have the lowest count; a column alone is sorted in a quarter of a table's time.
        is_last = pl.col(COUNT) == pl.col(COUNT).min()
        last = table.filter(is_last)
        last = last.with_columns(last[VALUE].sort(descending=self._by[VALUE]))
        others = table.filter(~is_last).sort(by, descending=descending)
        return pl.concat([others, last], rechunk=True)

    def _not_after(self, bounds: pl.DataFrame) -> pl.Expr:
        """Whether a row comes before the first one of a table, or is equal to it."""
        first = bounds.row(0, named=True)

        def compared(later: pl.Expr, name: str) -> pl.Expr:
            column, bound = pl.col(name), pl.lit(first[name], bounds.schema[name])
            before = column > bound if self._by[name] else column < bound
            return before | ((column == bound) & later)

        return reduce(compared, reversed(list(self._by)), pl.lit(True))


def write_pieces(path: Path, pieces: Iterable[pl.DataFrame], empty: pl.DataFrame = COUNTED) -> None:
    """Write tables like an `empty` one as a file; its bytes do not depend on how they are cut."""
    with pq.ParquetWriter(path, empty.to_arrow().schema, compression="zstd") as file:
        for piece in _regrouped(pieces, _ROWS_OF_A_PIECE, empty):
            file.write_table(piece.to_arrow())


def read_pieces(
    path: Path, rows: int | None = None, empty: pl.DataFrame = COUNTED
) -> Iterator[pl.DataFrame]:
    """What `write_pieces` wrote, so many rows at a time, and none if there are none.

    Raises OSError or ValueError if it is damaged.
    """
    rows = rows or _ROWS_OF_A_PIECE
    try:
        with path.open("rb") as opened, pq.ParquetFile(opened) as file:
            batches = file.iter_batches(rows, columns=empty.columns)
            tables = (pl.from_arrow(batch).cast(dict(empty.schema)) for batch in batches)
            yield from filter(len, _regrouped(tables, rows, empty))
    except UNREADABLE as failure:
        raise ValueError(f"{path.name} cannot be read ({failure!s:.100})") from None


def _regrouped(
    pieces: Iterable[pl.DataFrame], rows: int, empty: pl.DataFrame
) -> Iterator[pl.DataFrame]:
    """Tables of so many rows, and a last one of fewer, which may be empty."""
    waiting, held = [empty], 0
    for piece in pieces:
        waiting.append(piece)
        held += len(piece)
        if held >= rows:
            table = pl.concat(waiting)
            full = held - held % rows
            yield from table.head(full).iter_slices(rows)
            waiting, held = [table.slice(full)], held - full
    yield pl.concat(waiting)
