"""A vocabulary that grows from period to period: which ids get a row, and whose row they take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import polars as pl

from stampede.data.learning.vocabulary import COUNT, VALUE
from stampede.data.options import GrowthOptions

# More columns of a vocabulary that grows: periods, counted from 1.
ROW_SINCE, SEEN = "row_since", "seen"
PERIOD = "period"

KEPT = {VALUE: pl.String, COUNT: pl.Int64, ROW_SINCE: pl.Int32, SEEN: pl.Int32}
WAITING = {VALUE: pl.String, PERIOD: pl.Int32, COUNT: pl.Int64}


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
    given_up = pl.DataFrame(schema={"place": pl.UInt32})
    if most is not None and len(kept) + len(admitted) > most:
        room = max(most - len(kept), 0)
        given_up = _given_up(kept, period, options).head(len(admitted) - room)
        admitted = admitted.head(room + len(given_up))
    vocabulary = _placed(kept, admitted, given_up["place"])
    return Grown(vocabulary, waiting.join(admitted, on=VALUE, how="anti").sort([PERIOD, VALUE]))


def _given_up(kept: pl.DataFrame, period: int, options: GrowthOptions) -> pl.DataFrame:
    """Places of the ids absent from the period, in the order in which they lose their rows."""
    by = [SEEN, COUNT] if options.evict == "lru" else [COUNT, SEEN]
    absent = kept.with_row_index("place").filter(pl.col(SEEN) < period)
    # Among equals, the largest text goes first: it got its row last.
    return absent.sort([*by, VALUE], descending=[False, False, True])


def _placed(kept: pl.DataFrame, admitted: pl.DataFrame, free: pl.Series) -> pl.DataFrame:
    """All ids by row: new ones take the free places in turn, then new places."""
    places = pl.concat(
        [
            free.cast(pl.UInt32),
            pl.int_range(len(kept), len(kept) + len(admitted), eager=True).cast(pl.UInt32),
        ]
    ).head(len(admitted))
    kept = kept.with_row_index("place").filter(~pl.col("place").is_in(free.implode()))
    both = [kept, admitted.with_columns(places.alias("place")).select(kept.columns)]
    return pl.concat(both).sort("place").drop("place")
