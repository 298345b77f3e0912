"""Gives ids their rows by how often they occur, once or period by period."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pyarrow
import pyarrow.parquet as pq

from stampede.data.learning import COUNT, VALUE
from stampede.data.options import GrowthOptions
from stampede.data.schema.schema import Vocabulary
from stampede.settings import counted

# More columns of a vocabulary that grows: periods, counted from 1.
ROW_SINCE, SEEN = "row_since", "seen"
PERIOD = "period"

KEPT = {VALUE: pl.String, COUNT: pl.Int64, ROW_SINCE: pl.Int32, SEEN: pl.Int32}
WAITING = {VALUE: pl.String, PERIOD: pl.Int32, COUNT: pl.Int64}

# Ids that are sorted in memory; of more, sorted files are merged.
_MOST_IN_MEMORY = 4_000_000

# Of a file that is written or read piece by piece.
_ROWS_OF_A_PIECE = 1 << 18

_COUNTED = pl.DataFrame(schema={VALUE: pl.String, COUNT: pl.Int64})

# What Polars, PyArrow and damage that they do not detect raise; a panic is not an Exception.
_UNREADABLE = (pl.exceptions.PolarsError, pl.exceptions.PanicException, pyarrow.ArrowException)


def vocabulary(
    counts: Iterable[pl.DataFrame], field: Vocabulary, spill: Path, few: float = 0.0
) -> Iterator[pl.DataFrame]:
    """The ids that get a row: most frequent first, ties in the order of their text.

    Pieces with the columns `value` String and `count` Int64; line i of all of them has row
    `FIRST_ROW + i`. No more than a few million ids are in memory.

    Args:
        counts: tables of `value` and `count` with each value in one of them.
        spill: a folder for what does not fit into memory, empty or not there.
        few: ids rarer than `min_count` get rows too if all of them together occur less often.
    """
    kept, rare = _Sorting(spill / "kept"), _Sorting(spill / "rare")
    rows_of_rare = 0
    for table in counts:
        table = table.select(pl.col(VALUE), pl.col(COUNT).cast(pl.Int64))
        is_kept = pl.col(COUNT) >= field.min_count
        kept.add(table.filter(is_kept))
        if few:
            others = table.filter(~is_kept)
            rare.add(others)
            rows_of_rare += others[COUNT].sum()
            if rows_of_rare >= few:
                few, rare = 0.0, _Sorting(spill / "rare")
    room = field.max_size
    for piece in chain(kept.pieces(), rare.pieces()):
        yield piece.head(len(piece) if room is None else room)
        if room is not None:
            room -= min(room, len(piece))
    shutil.rmtree(spill, ignore_errors=True)


class _Sorting:
    """Sorts counted ids, most frequent first, with at most some millions of them in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        self._files: list[Path] = []
        self._tables = [_COUNTED]
        self._rows = 0

    def add(self, table: pl.DataFrame) -> None:
        """Take more ids."""
        self._tables.append(table)
        self._rows += len(table)
        if self._rows > _MOST_IN_MEMORY:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files.append(self._folder / f"{len(self._files)}.parquet")
            write_pieces(self._files[-1], [self._sorted()])

    def _sorted(self) -> pl.DataFrame:
        found = _sorted(pl.concat(self._tables))
        self._tables, self._rows = [_COUNTED], 0
        return found

    def pieces(self) -> Iterator[pl.DataFrame]:
        """All ids in order, some at a time."""
        in_memory = self._sorted().iter_slices(_ROWS_OF_A_PIECE)
        sources = [in_memory, *map(read_pieces, self._files)]
        waiting = [_COUNTED] * len(sources)
        while True:
            both = zip(waiting, sources, strict=True)
            waiting = [table if len(table) else next(source, table) for table, source in both]
            begun = [table for table in waiting if len(table)]
            if not begun:
                return
            # Nothing that is still to be read comes before the first of their last ids.
            value, count = _sorted(pl.concat([table.tail(1) for table in begun])).row(0)
            is_due = (pl.col(COUNT) > count) | ((pl.col(COUNT) == count) & (pl.col(VALUE) <= value))
            yield _sorted(pl.concat([table.filter(is_due) for table in begun]))
            waiting = [table.filter(~is_due) for table in waiting]


def _sorted(table: pl.DataFrame) -> pl.DataFrame:
    return table.sort([COUNT, VALUE], descending=[True, False])


def write_pieces(path: Path, pieces: Iterable[pl.DataFrame]) -> None:
    """Write counted ids as a file; its bytes do not depend on how they were divided."""
    with pq.ParquetWriter(path, _COUNTED.to_arrow().schema, compression="zstd") as file:
        for piece in _regrouped(pieces, _ROWS_OF_A_PIECE):
            file.write_table(piece.to_arrow())


def _regrouped(pieces: Iterable[pl.DataFrame], rows: int) -> Iterator[pl.DataFrame]:
    """Counted ids as tables of so many rows, and a last one of fewer, which may be empty."""
    waiting, held = [_COUNTED], 0
    for piece in pieces:
        waiting.append(piece)
        held += len(piece)
        if held >= rows:
            table = pl.concat(waiting)
            full = held - held % rows
            yield from table.head(full).iter_slices(rows)
            waiting, held = [table.slice(full)], held - full
    yield pl.concat(waiting)


def read_pieces(path: Path, rows: int = _ROWS_OF_A_PIECE) -> Iterator[pl.DataFrame]:
    """The ids of a vocabulary's file in the order of their rows, so many at a time, and counts.

    Raises OSError or ValueError if it is damaged.
    """
    try:
        with path.open("rb") as opened, pq.ParquetFile(opened) as file:
            batches = file.iter_batches(rows, columns=[VALUE, COUNT])
            tables = (pl.from_arrow(batch).cast(dict(_COUNTED.schema)) for batch in batches)
            for table in _regrouped(tables, rows):
                if len(table):
                    yield table
    except _UNREADABLE as failure:
        raise ValueError(f"{path.name} cannot be read ({failure!s:.100})") from None


def alike(vocabulary: Path, field: str) -> list[str]:
    """Sentences on the ids of a vocabulary that a person would take for another of its ids."""
    said = []
    accented = pl.col(VALUE).str.len_bytes() != pl.col(VALUE).str.len_chars()
    ways = {
        "by blanks around them": pl.col(VALUE).str.strip_chars(),
        "in how accents are encoded (Unicode NFC, NFD)": pl.when(accented).then(
            pl.col(VALUE).str.normalize("NFC")
        ),
    }
    for way, form in ways.items():
        changed = [
            piece.with_columns(form.alias("form")).filter(pl.col("form") != pl.col(VALUE))
            for piece in read_pieces(vocabulary)
        ]
        found = pl.concat(changed) if changed else _COUNTED
        if not len(found):
            continue
        forms = found["form"].implode()
        others = [piece.filter(pl.col(VALUE).is_in(forms)) for piece in read_pieces(vocabulary)]
        found = found.filter(pl.col("form").is_in(pl.concat(others)[VALUE].implode()))
        if len(found):
            one, other = found.row(0, named=True)[VALUE], found["form"][0]
            said.append(
                f"{counted(len(found), 'id')} of {field}, in {counted(found[COUNT].sum(), 'row')}, "
                f"differ from another id only {way}, such as {one!r} beside {other!r}: each has "
                "a row of its own; write them alike if they mean the same"
            )
    return said


class Grown(NamedTuple):
    """A field's ids after a period; the id in line i of the vocabulary has row `FIRST_ROW + i`."""

    vocabulary: pl.DataFrame  # columns of `KEPT`; counts are those since the id began to wait
    waiting: pl.DataFrame  # ids without a row; columns of `WAITING`


def nothing_known() -> Grown:
    """Before the first period."""
    return Grown(pl.DataFrame(schema=KEPT), pl.DataFrame(schema=WAITING))


def grown(
    before: Grown,
    counts: Iterable[pl.DataFrame],
    period: int,
    min_count: int,
    options: GrowthOptions,
    max_size: int | None = None,
) -> Grown:
    """A field's ids after one more period.

    The result depends on how often each id occurs in each period, not on the order of rows.

    Args:
        counts: tables of `value` and `count` in this period; each value in one of them.
        period: its number, from 1.
        min_count: occurrences that give an id a row.
        max_size: most ids of this field with a row, besides `options.max_rows`.
    """
    now = [table.select(pl.col(VALUE), pl.col(COUNT).cast(pl.Int64)) for table in counts]
    seen = pl.concat([pl.DataFrame(schema={VALUE: pl.String, COUNT: pl.Int64}), *now])
    kept = before.vocabulary.join(seen, on=VALUE, how="left", suffix="_now", maintain_order="left")
    is_here = pl.col(f"{COUNT}_now").is_not_null()
    kept = kept.select(
        VALUE,
        pl.col(COUNT) + pl.col(f"{COUNT}_now").fill_null(0),
        ROW_SINCE,
        pl.when(is_here).then(pl.lit(period, pl.Int32)).otherwise(pl.col(SEEN)).alias(SEEN),
    )
    new = seen.join(before.vocabulary, on=VALUE, how="anti").select(
        VALUE, pl.lit(period, pl.Int32).alias(PERIOD), COUNT
    )
    recent = before.waiting.filter(pl.col(PERIOD) > period - options.admission_periods)
    waiting = pl.concat([recent, new])
    admitted = (
        waiting.group_by(VALUE)
        .agg(pl.col(COUNT).sum(), pl.col(PERIOD).max().alias(SEEN))
        .filter(pl.col(COUNT) >= min_count)
        .sort([COUNT, VALUE], descending=[True, False])
        .with_columns(pl.lit(period, pl.Int32).alias(ROW_SINCE))
    )
    most = min((limit for limit in (options.max_rows, max_size) if limit is not None), default=None)
    placed = kept.with_row_index("place")
    free = pl.Series("place", [], pl.UInt32)
    if most is not None and len(kept) + len(admitted) > most:
        room = max(most - len(kept), 0)
        # Ids absent from the period lose their rows. Among equals, the largest text goes first: it
        # got its row last.
        by = [SEEN, COUNT] if options.evict == "lru" else [COUNT, SEEN]
        absent = placed.filter(pl.col(SEEN) < period)
        given_up = absent.sort([*by, VALUE], descending=[False, False, True])
        free = given_up["place"].head(len(admitted) - room)
        admitted = admitted.head(room + len(free))
    # New ids take the free places in turn, then new places.
    new_places = pl.int_range(len(kept), len(kept) + len(admitted), dtype=pl.UInt32, eager=True)
    places = pl.concat([free, new_places.alias("place")]).head(len(admitted))
    kept = placed.filter(~pl.col("place").is_in(free.implode()))
    vocabulary = pl.concat([kept, admitted.with_columns(places).select(kept.columns)])
    vocabulary = vocabulary.sort("place").drop("place")
    waiting = waiting.join(admitted, on=VALUE, how="anti").sort([PERIOD, VALUE])
    return Grown(vocabulary, waiting)


def read_vocabulary(path: Path, columns: Iterable[str] = (VALUE,)) -> pl.DataFrame:
    """Columns of a vocabulary's file by row. Raises OSError or ValueError if it is damaged."""
    try:
        return pl.read_parquet(path, columns=[*columns], glob=False)
    except _UNREADABLE as failure:
        raise ValueError(f"{path.name} cannot be read ({failure!s:.100})") from None
