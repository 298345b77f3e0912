"""Statistics of the columns of a click log, computed by Polars one column at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import polars as pl

from stampede.data.errors import DataError
from stampede.data.formulas import bucket_rows
from stampede.data.prepared.manifest import PARTS, missing_marks_sentence
from stampede.data.progress import RowProgress
from stampede.data.raw.log import LABEL, TIME
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Hashed, IdField, Integers, Quantiles, TimePart
from stampede.data.sources import TEST, TRAIN, VALIDATION, Assignment, Source
from stampede.settings import counted

PART, PLACE = "#part", "#place"

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
class Rows:
    """Rows to describe."""

    # Ids, numbers, `#label`, `#part` (index into `PARTS`), `#place`; null is missing.
    frame: pl.LazyFrame
    by_time: bool  # whether `#place` is seconds since 1970; else it is the row's number
    is_cut_by_rows: bool  # whether the last rows, in their order, are the test part
    ids: Mapping[str, str]  # kind of each id field, in a word, by name
    numbers: Sequence[str]
    notes: Sequence[str]  # sentences for the reader of the description


def read_rows(source: Source, bad_rows: BadRows, limit: int | None, folder: Path) -> Rows:
    """Rows of a log, copied to Parquet files in a folder.

    Args:
        limit: read only this many rows, bad ones included; None: all.

    Raises:
        DataError: the log has no good row, or has a bad row and `bad_rows` refuses it.
    """
    log, fields, by_time = source.log, source.log.schema.ids, source.log.schema.time is not None
    counts = log.counts(limit) if limit or source.split.needs_counts() else None
    assignment, rows = Assignment(source, counts), 0
    with RowProgress("describing", log.bytes) as progress:
        for read in log.chunks(bad_rows):
            chunk = read.take(read.numbers < counts[read.file]) if limit else read
            place = pl.col(TIME) if by_time else pl.int_range(pl.len()) + rows
            parts = pl.Series(PART, assignment.parts(chunk))
            frame = chunk.frame.with_columns(parts, place.cast(pl.Int64).alias(PLACE))
            if len(frame):
                frame.write_parquet(folder / f"{rows:015d}.parquet", compression="lz4")
            rows += len(frame)
            progress.advance_to(chunk.position, len(frame))
            if limit and rows + bad_rows.count >= sum(counts):
                break
    if not rows:
        log.check_rows()
        raise DataError(
            f"{log.files[0]}: has no good row, but {counted(bad_rows.count, 'bad row')}"
        )
    notes = [
        f"parts: split {source.split.split}, see --set",
        "" if limit is None else f"only the first {limit:,} rows were read (--rows)",
        f"left out {counted(bad_rows.count, 'bad row')}, listed in a file" * bool(bad_rows.count),
        missing_marks_sentence(bad_rows.marks_by_column()),
    ]
    # A column cut into quantiles is described as a number.
    cut = [name for name, found in fields.items() if isinstance(found, Quantiles)]
    return Rows(
        pl.scan_parquet(sorted(folder.glob("*.parquet"))),
        by_time,
        source.split.split == "sequential",
        {name: _kind(found) for name, found in fields.items() if name not in cut},
        [*log.schema.numbers, *cut],
        [note for note in notes if note],
    )


def _kind(found: IdField) -> str:
    """The field's kind as the table shows it."""
    if isinstance(found, TimePart):
        return found.encode.replace("_", " ")
    if isinstance(found, Hashed):
        return f"hash {found.buckets:,}"
    word = "integers" if isinstance(found, Integers) else "ids"
    return word if found.separator is None else f"many {word}"


@dataclass(frozen=True)
class Column:
    """An id field or a number; a row of a multi-valued field without an id counts as one id."""

    name: str
    values: np.ndarray  # `[3]` rows of each part, or ids of a multi-valued field
    missing: np.ndarray  # `[3]` how many of them are missing
    # `[3]` how many are ids absent from the training part; None for numbers
    unseen: np.ndarray | None
    alone: float | None  # test AUC of the click rates in the training part, if defined
    rates: np.ndarray  # `[n, 2]` rows and clicks of `top`; or of missing values and four quarters
    kind: str = "number"  # how ids are encoded, in a word
    distinct: int = 0  # number of different ids
    curve: tuple[np.ndarray, np.ndarray] = ()  # k, and the share of present ids that k cover
    top: Sequence[str] = ()  # the most frequent ids
    summary: Sequence[float] = ()  # of a number: mean, minimum, `QUANTILES`, maximum
    # Of a number: edges, and rows and clicks between them.
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
    """Statistics of a whole data set."""

    rows: np.ndarray  # `[3]` of each part
    clicks: np.ndarray  # `[3]` of each part
    ids: list[Column]
    numbers: list[Column]
    by_time: bool  # whether slices span seconds since 1970; else rows
    width: int  # of a slice
    # Share of the training rows that are newer than half of the test rows, where times are known
    # and the test part should be the newest rows.
    newer: float
    slices: pl.DataFrame  # `start`, `rows` and `clicks` of each slice that has rows, in order

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
    """Statistics of all rows, with the counts of one column in memory at a time."""
    counts = _counts(rows.frame.select(PART, LABEL, pl.lit(0).alias(_VALUE)))[1].sum(0)
    ends = rows.frame.select(first=pl.col(PLACE).min(), last=pl.col(PLACE).max())
    width = least_width(*ends.collect().row(0), rows.by_time, SLICES)
    slices = rows.frame.group_by(start=pl.col(PLACE) // width * width)
    slices = slices.agg(rows=pl.len().cast(pl.Int64), clicks=(pl.col(LABEL) >= 0.5).sum())
    return Statistics(
        rows=counts[:, 0],
        clicks=counts[:, 1],
        ids=[_ids(rows, name) for name in rows.ids],
        numbers=[_number(rows, name) for name in rows.numbers],
        by_time=rows.by_time,
        width=width,
        newer=_newer(rows),
        slices=slices.sort("start").collect(engine="streaming"),
    )


def _newer(rows: Rows) -> float:
    if not (rows.by_time and rows.is_cut_by_rows):
        return 0.0
    test = rows.frame.filter(pl.col(PART) == TEST).select(pl.col(PLACE).median()).collect().item()
    if test is None:
        return 0.0
    train = rows.frame.filter(pl.col(PART) == TRAIN)
    return train.select((pl.col(PLACE) > test).mean()).collect().item() or 0.0


def short(name: str, most: int = 17) -> str:
    """A name of at most `most` characters."""
    return name if len(name) <= most else name[: most - 2] + ".."


def least_width(first: int, last: int, by_time: bool, most: int) -> int:
    """The smallest width that gives at most `most` slices; it divides all larger widths."""
    widths = _TIMES if by_time else tuple(2**i for i in range(62))
    return next((width for width in widths if last // width - first // width < most), widths[-1])


def _counts(values: pl.LazyFrame) -> tuple[pl.Series, np.ndarray]:
    """Each value once, null included, and `[values, parts, 2]` its rows and clicks."""
    is_click = pl.col(LABEL) >= 0.5
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
    totals = pl.DataFrame({_VALUE: ids, "rows": counts[..., 0].sum(1)}).with_row_index("at")
    known = totals.drop_nulls(_VALUE)
    top = known.top_k(_TOP_IDS, by=["rows", _VALUE], reverse=[False, True])
    top = top.sort(["rows", _VALUE], descending=[True, False])
    # Coverage of the first k ids, for log-spaced k and those of `TOPS`.
    ordered, most = known["rows"].sort(descending=True).to_numpy(), len(known)
    points = np.geomspace(1, most, _CURVE_POINTS).astype(np.int64) if most else []
    places = np.unique([*points, *(top for top in TOPS if top <= most), most]).astype(np.int64)
    places = places[places > 0]
    return Column(
        name=name,
        values=counts[..., 0].sum(0),
        missing=counts[is_missing][..., 0].sum(0),
        unseen=counts[is_unseen & ~is_missing][..., 0].sum(0),
        alone=_auc_alone(counts),
        rates=counts[top["at"].to_numpy()].sum(1),
        kind=rows.ids[name],
        distinct=len(known),
        curve=(places, np.cumsum(ordered)[places - 1] / ordered.sum()),
        # On one line.
        top=[x if x.isprintable() else repr(x) for x in map(str, top[_VALUE])],
    )


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
        missing=by_bucket[0, :, 0],
        unseen=None,
        alone=_auc_alone(by_bucket),
        rates=np.pad(by_quarter.sum(1), ((0, 5 - len(by_quarter)), (0, 0))),
        summary=summary,
        histogram=_histogram(values.to_numpy(), (present[LABEL] >= 0.5).to_numpy()),
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
