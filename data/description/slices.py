"""Label rate over time, with slices that widen as the log goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

SLICES = 50
# Finer than what is shown, so that the slices shown can still be chosen at the end.
_FINEST = 4096

_MINUTE, _HOUR, _DAY = 60, 3600, 86400

# Each divides the next, so that a wider slice consists of whole narrower ones.
TIME_WIDTHS = (
    1,
    10,
    _MINUTE,
    5 * _MINUTE,
    15 * _MINUTE,
    _HOUR,
    3 * _HOUR,
    6 * _HOUR,
    12 * _HOUR,
    _DAY,
    7 * _DAY,
    28 * _DAY,
    364 * _DAY,
)
ROW_WIDTHS = tuple(2**i for i in range(62))


@dataclass(frozen=True)
class LabelSlices:
    """Label rate over time.

    Attributes:
        by_time: whether places are seconds since 1970, not numbers of rows.
        width: of a slice.
        table: `start` of each slice that has rows, in order, its `rows` and `positives`.
    """

    by_time: bool
    width: int
    table: pl.DataFrame


class SliceCounter:
    """Counts rows and positives per slice in bounded memory.

    Args:
        widths: of slices, each a divisor of the next.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = widths
        self._level = 0
        self._table = pl.DataFrame(
            schema={"start": pl.Int64, "rows": pl.Int64, "positives": pl.Int64}
        )

    def add(self, places: pl.Series, label: pl.Series) -> None:
        """Some rows: place (Int64) and label of each."""
        positives = (label > 0).cast(pl.Int64)
        rows = pl.DataFrame({"start": places.cast(pl.Int64), "positives": positives})
        rows = rows.with_columns(rows=pl.lit(1, pl.Int64)).select(self._table.columns)
        # The new rows alone first; they are many more than the slices.
        self._table = pl.concat([self._table, _grouped(rows, self._widths[self._level])])
        self._widen(_FINEST)

    def slices(self, by_time: bool) -> LabelSlices:
        """At most `SLICES` slices, empty ones counted but not listed."""
        while self._spanned() > SLICES and self._level + 1 < len(self._widths):
            self._level += 1
            self._widen(_FINEST)
        return LabelSlices(by_time, self._widths[self._level], self._table.sort("start"))

    def _widen(self, most: int) -> None:
        self._table = _grouped(self._table, self._widths[self._level])
        while len(self._table) > most and self._level + 1 < len(self._widths):
            self._level += 1
            self._table = _grouped(self._table, self._widths[self._level])

    def _spanned(self) -> int:
        if not len(self._table):
            return 0
        width = self._widths[self._level]
        return (self._table["start"].max() - self._table["start"].min()) // width + 1


def _grouped(table: pl.DataFrame, width: int) -> pl.DataFrame:
    return table.group_by(pl.col("start") // width * width).agg(
        pl.col("rows").sum(), pl.col("positives").sum()
    )
