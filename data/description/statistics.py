"""Statistics of the columns of a data set, computed by Polars one column at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import numpy as np
import polars as pl

from stampede.data.description.rows import PART, PLACE, Rows
from stampede.data.formulas import bucket_rows
from stampede.data.prepared.manifest import PARTS
from stampede.data.raw.log import LABEL
from stampede.data.sources import TEST, TRAIN, VALIDATION

TOPS = (1, 10, 100, 1000)
QUANTILES = (0.25, 0.5, 0.75, 0.99)

# The most frequent ids, whose click rate is shown.
_TOP_IDS = 10

SLICES = 50
_MINUTE, _HOUR, DAY = 60, 3600, 86400
_TIMES = (1, 10, _MINUTE, 5 * _MINUTE, 15 * _MINUTE, _HOUR, 3 * _HOUR, 6 * _HOUR, 12 * _HOUR)
_TIMES += tuple(DAY * days for days in (1, 7, 28, 364, 3640, 36400, 364000))
_UNITS = {"day": DAY, "hour": _HOUR, "minute": _MINUTE, "second": 1}

_CURVE_POINTS = 64
_BINS = 40

# For the AUC of a column: buckets of a number, and rows at the mean click rate that smooth a rate.
_BUCKETS, _PRIOR = 50, 20

_VALUE = "value"


@dataclass(frozen=True)
class Column:
    """An id field or a number.

    Attributes:
        name: of the column.
        values: `[3]` rows of each part, or ids of a multi-valued field, where a row without an id
            counts as one.
        missing: `[3]` how many of them are missing; None if not known.
        unseen: `[3]` how many of them are ids absent from the training part; None for numbers.
        alone: test AUC of the column's click rates in the training part; None if a part is empty or
            has only one class.
        rates: `[n, 2]` rows and clicks of the most frequent ids; for numbers, of missing values
            and the four quarters.
        kind: how ids are encoded, in a word.
        distinct: number of different ids.
        curve: k, and the share of all present ids that the k most frequent cover.
        top: text of the most frequent ids.
        summary: of a number: mean, minimum, `QUANTILES`, maximum; empty if all are missing.
        histogram: of a number: edges, and rows and clicks between them.
    """

    name: str
    values: np.ndarray
    missing: np.ndarray | None
    unseen: np.ndarray | None
    alone: float | None
    rates: np.ndarray
    kind: str = "number"
    distinct: int = 0
    curve: tuple[np.ndarray, np.ndarray] = ()
    top: Sequence[str] = ()
    summary: Sequence[float] = ()
    histogram: tuple[np.ndarray, np.ndarray, np.ndarray] = ()

    def coverage(self, ids: int) -> float | None:
        """Share that the `ids` most frequent ids cover; `ids` is one of `TOPS`."""
        if not self.distinct:
            return None
        return float(self.curve[1][np.searchsorted(self.curve[0], min(ids, self.distinct))])

    def share(self, what: str, part: int | None = None) -> float | None:
        """Share of a part's values, or of all, that are `missing` or `unseen`, if known."""
        counts = getattr(self, what)
        if counts is None or (what == "unseen" and not self.values[TRAIN]):
            return None
        count, of = (x.sum() if part is None else x[part] for x in (counts, self.values))
        return float(count / of) if of else None


@dataclass(frozen=True)
class Statistics:
    """Statistics of a whole data set.

    Attributes:
        rows, clicks: `[3]` of each part.
        ids, numbers: its columns.
        by_time: whether slices span seconds since 1970; else rows.
        width: width of a slice.
        slices: `start`, `rows` and `clicks` of each slice that has rows, in order.
    """

    rows: np.ndarray
    clicks: np.ndarray
    ids: list[Column]
    numbers: list[Column]
    by_time: bool
    width: int
    slices: pl.DataFrame

    @property
    def rate(self) -> float:
        """Click rate of all rows."""
        return float(self.clicks.sum() / self.rows.sum())

    def wider(self, width: int) -> pl.DataFrame:
        """The slices merged to a larger width."""
        start = pl.col("start") // width * width
        return self.slices.group_by(start).sum().sort("start")

    def place(self, start: int) -> str:
        """Start of a slice: a time (UTC) or a row number."""
        if not self.by_time:
            return f"row {start:,}"
        try:
            when = datetime.fromtimestamp(start, timezone.utc)
        except (OverflowError, ValueError, OSError):
            return f"{start} s"
        return f"{when:%Y-%m-%d %H:%M}" if start % 60 == 0 else f"{when:%Y-%m-%d %H:%M:%S}"

    def span(self, width: int) -> str:
        """Width of a slice, such as `3 hours` or `4,096 rows`."""
        if not self.by_time:
            return f"{width:,} rows"
        unit, seconds = next(item for item in _UNITS.items() if width % item[1] == 0)
        return f"{width // seconds} {unit}" + "s" * (width > seconds)


def collect(rows: Rows) -> Statistics:
    """Statistics of all rows, with the counts of one column in memory at a time.

    Raises:
        DataError: the texts of ids cannot be read.
    """
    counts = _counts(rows.frame.select(PART, LABEL, pl.lit(0).alias(_VALUE)))[1].sum(0)
    ends = rows.frame.select(first=pl.col(PLACE).min(), last=pl.col(PLACE).max())
    width = least_width(*ends.collect().row(0), rows.by_time, SLICES)
    slices = rows.frame.group_by(start=pl.col(PLACE) // width * width)
    slices = slices.agg(rows=pl.len().cast(pl.Int64), clicks=(pl.col(LABEL) > 0).sum())
    return Statistics(
        rows=counts[:, 0],
        clicks=counts[:, 1],
        ids=[_ids(rows, name) for name in rows.ids],
        numbers=[_number(rows, name) for name in rows.numbers],
        by_time=rows.by_time,
        width=width,
        slices=slices.sort("start").collect(engine="streaming"),
    )


def short(name: str, most: int = 17) -> str:
    """A name of at most `most` characters."""
    return name if len(name) <= most else name[: most - 2] + ".."


def least_width(first: int, last: int, by_time: bool, most: int) -> int:
    """The smallest width that gives at most `most` slices; it divides all larger widths."""
    widths = _TIMES if by_time else tuple(2**i for i in range(62))
    return next((width for width in widths if last // width - first // width < most), widths[-1])


def _counts(values: pl.LazyFrame) -> tuple[pl.Series, np.ndarray]:
    """Each value once, null included, and `[values, parts, 2]` its rows and clicks."""
    is_click = pl.col(LABEL) > 0
    counted = values.group_by(_VALUE).agg(
        counted.sum().cast(pl.Int64).alias(f"{part}{kind}")
        for part in range(len(PARTS))
        for rows in [pl.col(PART) == part]
        for kind, counted in (("rows", rows), ("clicks", rows & is_click))
    )
    counted = counted.collect(engine="streaming")
    return counted[_VALUE], counted.drop(_VALUE).to_numpy().reshape(-1, len(PARTS), 2)


def _ids(rows: Rows, name: str) -> Column:
    values = rows.frame.select(PART, LABEL, pl.col(name).alias(_VALUE))
    if isinstance(values.collect_schema()[_VALUE], pl.List):
        values = values.explode(_VALUE)  # an empty list becomes null
    ids, counts = _counts(values)
    is_missing = ids.is_null().to_numpy()
    is_unseen = counts[:, TRAIN, 0] == 0
    is_known = ~is_missing
    if name in rows.unseen:
        is_unseen = (ids == rows.unseen[name]).fill_null(False).to_numpy()
        is_known &= ~is_unseen
    totals = pl.DataFrame({_VALUE: ids, "rows": counts[..., 0].sum(1)}).with_row_index("at")
    known = totals.filter(pl.Series(is_known))
    top = known.top_k(_TOP_IDS, by=["rows", _VALUE], reverse=[False, True])
    top = top.sort(["rows", _VALUE], descending=[True, False])
    present = counts[~is_missing][..., 0].sum()
    return Column(
        name=name,
        values=counts[..., 0].sum(0),
        missing=counts[is_missing][..., 0].sum(0),
        unseen=counts[is_unseen & ~is_missing][..., 0].sum(0),
        alone=_auc_alone(counts),
        rates=counts[top["at"].to_numpy()].sum(1),
        kind=rows.ids[name],
        distinct=len(known),
        curve=_curve(known["rows"].sort(descending=True).to_numpy(), present),
        top=rows.texts(name, top[_VALUE].to_list()),
    )


def _curve(ordered: np.ndarray, present: int) -> tuple[np.ndarray, np.ndarray]:
    """Coverage of the first k `ordered` counts, for log-spaced k and those of `TOPS`."""
    most = len(ordered)
    points = np.geomspace(1, most, _CURVE_POINTS).astype(np.int64) if most else []
    places = np.unique([*points, *(top for top in TOPS if top <= most), most])
    places = places[places > 0]
    return places, np.cumsum(ordered)[places - 1] / present


def _number(rows: Rows, name: str) -> Column:
    table = rows.frame.select(PART, LABEL, pl.col(name).alias(_VALUE)).collect()
    present = table.drop_nulls(_VALUE)
    values, train = present[_VALUE], present.filter(pl.col(PART) == TRAIN)[_VALUE]
    summary = []
    if len(values):
        quantiles = [values.quantile(share, "nearest") for share in QUANTILES]
        summary = [values.mean(), values.min(), *quantiles, values.max()]
    shares = np.arange(1, _BUCKETS) / _BUCKETS
    edges = sorted({train.quantile(share, "nearest") for share in shares}) if len(train) else []
    # Bucket 0 holds the missing values.
    by_bucket, by_quarter = _bucket_counts(table, edges), _bucket_counts(table, summary[2:5])
    return Column(
        name=name,
        values=by_bucket[..., 0].sum(0),
        missing=None if rows.filled else by_bucket[0, :, 0],
        unseen=None,
        alone=_auc_alone(by_bucket),
        rates=np.pad(by_quarter.sum(1), ((0, 5 - len(by_quarter)), (0, 0))),
        summary=summary,
        histogram=_histogram(values.to_numpy(), (present[LABEL] > 0).to_numpy()),
    )


def _bucket_counts(table: pl.DataFrame, edges: list[float]) -> np.ndarray:
    """Rows and clicks per bucket, `[1 + buckets, parts, 2]`; bucket 0 holds the missing values."""
    counts = np.zeros((len(edges) + 2, len(PARTS), 2), np.int64)
    buckets, of_buckets = _counts(
        table.with_columns(pl.Series(_VALUE, bucket_rows(table[_VALUE], edges))).lazy()
    )
    counts[buckets.to_numpy()] = of_buckets
    return counts


def _auc_alone(counts: np.ndarray) -> float | None:
    """Test AUC of the training part's click rates; `counts` is `[values, parts, 2]`."""
    held = TEST if counts[:, TEST].any() else VALIDATION
    rows, clicks = counts[:, TRAIN].T
    if not rows.any():
        return None
    score = (clicks + _PRIOR * clicks.sum() / rows.sum()) / (rows + _PRIOR)
    _, order = np.unique(score, return_inverse=True)
    positives = np.bincount(order, counts[:, held, 1])
    negatives = np.bincount(order, counts[:, held, 0]) - positives
    below = np.cumsum(negatives) - negatives / 2
    pairs = positives.sum() * negatives.sum()
    return float((positives * below).sum() / pairs) if pairs else None


def _histogram(values: np.ndarray, clicks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges of the bins, and the rows and clicks in each; `clicks` is a mask."""
    if not len(values):
        return np.empty(0), np.empty(0), np.empty(0)
    low, middle, high = np.quantile(values, [0.001, 0.5, 0.999])
    # Counts and prices: most values near zero, some a thousand times larger.
    if high > 50 and high > 10 * max(abs(middle), 1):
        # 0, 1, 2, 4, ... and the same below zero: finer bins of counts would look like a comb.
        up, down = (2.0 ** np.arange(np.ceil(np.log2(max(x, 1))) + 1) for x in (high, -low))
        edges = np.concatenate([-down[::-1] if low < 0 else [], [0.0], up])
    else:
        edges = np.linspace(low, high if high > low else low + max(1, abs(low)), _BINS + 1)
    return edges, np.histogram(values, edges)[0], np.histogram(values[clicks], edges)[0]
