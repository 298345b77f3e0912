"""Statistics gathered piece by piece, in bounded memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from stampede.data.description.inputs import Described
from stampede.data.description.sample import RowSample
from stampede.data.description.slices import ROW_WIDTHS, TIME_WIDTHS, SliceCounter
from stampede.data.description.statistics import (
    QUANTILES,
    TOPS,
    ByPart,
    IdColumn,
    NumberColumn,
    Statistics,
)
from stampede.data.learning.counts import COUNT, VALUE, ValueCounts
from stampede.data.learning.numbers import NumberRange
from stampede.data.prepared.manifest import PARTS
from stampede.data.progress import RowProgress
from stampede.data.raw.typed import LABEL, TIME
from stampede.data.splits import TRAIN

# A quantile of so many rows is off by some 0.2 % of the rows, which no eye sees.
_SAMPLE_ROWS = 1 << 18
_COUNTS_BYTES = 1_500_000_000
_CURVE_POINTS = 64
_TOP_IDS = 3


def collect(data: Described) -> Statistics:
    """Statistics of all rows.

    Raises:
        DataError: the data cannot be used.
    """
    with (
        tempfile.TemporaryDirectory() as spill,
        RowProgress("describing", data.bytes) as progress,
    ):
        collector = Collector(data.ids, data.numbers, data.unseen_rows, data.filled, Path(spill))
        for piece in data.pieces():
            collector.add(piece.frame, piece.parts)
            progress.advance_to(piece.position, len(piece.frame))
        return collector.statistics()


class Collector:
    """Gathers statistics.

    Args:
        ids: id fields.
        numbers: numbers.
        unseen_rows: by id field, the id that stands for those that the training part lacks, where
            there is one.
        filled: whether missing numbers were filled, so that nobody knows how many they were.
        spill: folder for counts that need too much memory. At the end all ids of one field are
            in memory at a time.
    """

    def __init__(
        self,
        ids: Sequence[str],
        numbers: Sequence[str],
        unseen_rows: Mapping[str, int],
        filled: bool,
        spill: Path,
    ) -> None:
        self._ids, self._numbers, self._unseen_rows = list(ids), list(numbers), unseen_rows
        self._counts = [
            ValueCounts(self._ids, _COUNTS_BYTES // len(PARTS), spill / part) for part in PARTS
        ]
        self._rows, self._positives = np.zeros((2, len(PARTS)), dtype=np.int64)
        self._missing_known = self._ids + self._numbers * (not filled)
        self._values = {
            name: np.zeros((2, len(PARTS)), dtype=np.int64) for name in self._ids + self._numbers
        }
        self._ranges = {name: NumberRange() for name in self._numbers}
        self._sample = RowSample(_SAMPLE_ROWS)
        self._slices: SliceCounter | None = None
        self._by_time = False

    def add(self, frame: pl.DataFrame, parts: np.ndarray) -> None:
        """Some rows, and the number of each one's part (see `inputs.Piece`)."""
        if self._slices is None:
            self._by_time = TIME in frame.columns
            self._slices = SliceCounter(TIME_WIDTHS if self._by_time else ROW_WIDTHS)
        done = int(self._rows.sum())
        places = (
            frame[TIME]
            if self._by_time
            else pl.int_range(done, done + len(frame), dtype=pl.Int64, eager=True)
        )
        self._slices.add(places, frame[LABEL])
        if self._numbers:
            self._sample.add(frame.select(self._numbers))
            for name, found in _ranges(frame, self._numbers).items():
                self._ranges[name] = self._ranges[name].merged(found)
        for part in range(len(PARTS)):
            mask = parts == part
            if mask.all():
                self._add_to_part(frame, part)
            elif mask.any():
                self._add_to_part(frame.filter(pl.Series(mask)), part)

    def statistics(self) -> Statistics:
        """Of all rows so far; can be asked for once."""
        sample = self._sample.frame()
        slices = self._slices or SliceCounter(ROW_WIDTHS)
        return Statistics(
            rows=self._rows,
            positives=self._positives,
            ids=[self._id_column(name) for name in self._ids],
            numbers=[self._number_column(name, sample) for name in self._numbers],
            slices=slices.slices(self._by_time),
            sampled=None if self._sample.whole else len(sample),
        )

    def _add_to_part(self, frame: pl.DataFrame, part: int) -> None:
        self._rows[part] += len(frame)
        self._positives[part] += int((frame[LABEL] > 0).sum())
        self._counts[part].add(frame)
        found = frame.lazy().select(
            pl.concat_list(_each(frame, name).len(), _each(frame, name).null_count()).alias(name)
            for name in self._missing_known
        )
        for name, counted in found.collect().row(0, named=True).items():
            self._values[name][:, part] += counted

    def _id_column(self, name: str) -> IdColumn:
        table = self._counted(name)
        parts = [str(part) for part in range(len(PARTS))]
        unseen_row = self._unseen_rows.get(name)
        if unseen_row is None:
            unseen = table.filter(pl.col(str(TRAIN)) == 0)
            known = table
        else:
            unseen = table.filter(pl.col(VALUE) == unseen_row)
            known = table.filter(pl.col(VALUE) != unseen_row)
        values, missing = self._values[name]
        total = known.select(VALUE, total=pl.sum_horizontal(parts))
        ordered = np.sort(total["total"].to_numpy())[::-1]
        top = total.top_k(_TOP_IDS, by=["total", VALUE], reverse=[False, True])
        top = top.sort(["total", VALUE], descending=[True, False])
        return IdColumn(
            name=name,
            by_part=ByPart(values, missing, unseen.select(parts).sum().to_numpy()[0]),
            distinct=len(ordered),
            curve=_curve(ordered, int((values - missing).sum())),
            top=top[VALUE].to_list(),
        )

    def _counted(self, name: str) -> pl.DataFrame:
        """Counts of a field's ids: `value` and a column for each part."""
        tables = [
            table.select(
                VALUE,
                *(
                    (pl.col(COUNT) if number == part else pl.lit(0)).cast(pl.Int64).alias(str(part))
                    for part in range(len(PARTS))
                ),
            )
            for number, counts in enumerate(self._counts)
            for table in counts.tables(name)
        ]
        if not tables:
            return pl.DataFrame(
                schema={VALUE: pl.Int64, **{str(part): pl.Int64 for part in range(len(PARTS))}}
            )
        return pl.concat(tables).lazy().group_by(VALUE).agg(pl.all().sum()).collect()

    def _number_column(self, name: str, sample: pl.DataFrame) -> NumberColumn:
        present = sample[name].drop_nulls().to_numpy() if name in sample.columns else np.empty(0)
        # Values of the sample, not means of two: a number that no row has would be odd.
        quantiles = np.quantile(present, QUANTILES, method="inverted_cdf") if len(present) else []
        return NumberColumn(
            name=name,
            by_part=ByPart(*self._values[name]),
            range=self._ranges[name],
            quantiles=[float(quantile) for quantile in quantiles],
            sample=present,
        )


def _each(frame: pl.DataFrame, name: str) -> pl.Expr:
    """A column's values; an empty list has one, null."""
    column = pl.col(name)
    return column.explode() if isinstance(frame.schema[name], pl.List) else column


def _ranges(frame: pl.DataFrame, names: Sequence[str]) -> dict[str, NumberRange]:
    """Ranges of the values that are there."""
    found = frame.lazy().select(
        pl.struct(
            rows=pl.col(name).count().cast(pl.Int64),
            low=pl.col(name).min(),
            high=pl.col(name).max(),
            mean=pl.col(name).mean(),
            squares=pl.col(name).var(ddof=0) * pl.col(name).count(),
        ).alias(name)
        for name in names
    )
    ranges = found.collect().row(0, named=True)
    return {
        name: NumberRange(**values) if values["rows"] else NumberRange()
        for name, values in ranges.items()
    }


def _curve(ordered: np.ndarray, present: int) -> tuple[np.ndarray, np.ndarray]:
    """Coverage of the first k of `ordered` counts, k evenly on a log scale and all of `TOPS`."""
    if not len(ordered):
        return np.empty(0, dtype=np.int64), np.empty(0)
    covered = np.cumsum(ordered) / present
    points = np.geomspace(1, len(ordered), _CURVE_POINTS).astype(np.int64)
    tops = [top for top in TOPS if top <= len(ordered)]
    places = np.unique(np.concatenate([points, tops, [len(ordered)]]))
    return places, covered[places - 1]
