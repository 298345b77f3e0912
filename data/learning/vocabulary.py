"""Gives ids their rows by how often they occur, once or period by period."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import polars as pl

from stampede.data.learning import COUNT, VALUE
from stampede.data.learning.sorting import COUNTED, UNREADABLE, Sorting, read_pieces
from stampede.data.options import GrowthOptions
from stampede.data.schema.schema import Vocabulary
from stampede.settings import counted

# More columns of a vocabulary that grows: periods, counted from 1.
ROW_SINCE, SEEN = "row_since", "seen"
PERIOD = "period"

KEPT = {VALUE: pl.String, COUNT: pl.Int64, ROW_SINCE: pl.Int32, SEEN: pl.Int32}
WAITING = {VALUE: pl.String, PERIOD: pl.Int32, COUNT: pl.Int64}

_MOST_FREQUENT_FIRST = {COUNT: True, VALUE: False}


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
    kept, rare = (Sorting(spill / one, _MOST_FREQUENT_FIRST) for one in ("kept", "rare"))
    rows_of_rare = 0
    for table in counts:
        is_kept = pl.col(COUNT) >= field.min_count
        kept.add(table.filter(is_kept))
        if few:
            others = table.filter(~is_kept)
            rare.add(others)
            rows_of_rare += others[COUNT].sum()
            if rows_of_rare >= few:
                few, rare = 0.0, Sorting(spill / "rare", _MOST_FREQUENT_FIRST)
    room = field.max_size
    for piece in chain(kept.pieces(), rare.pieces()):
        yield piece.head(len(piece) if room is None else room)
        if room is not None:
            room -= min(room, len(piece))
    shutil.rmtree(spill, ignore_errors=True)


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
    changed: dict[str, list[pl.DataFrame]] = {way: [] for way in ways}
    for piece in read_pieces(vocabulary):
        for way, form in ways.items():
            of_piece = piece.with_columns(form.alias("form"))
            changed[way] += [of_piece.filter(pl.col("form") != pl.col(VALUE))]
    for way, tables in changed.items():
        found = pl.concat(tables or [COUNTED])
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
    except UNREADABLE as failure:
        raise ValueError(f"{path.name} cannot be read ({failure!s:.100})") from None
