"""Learns ids, ranges and quantiles from the training part, saves them, and encodes rows.

Functions that read a folder raise a `DataError` with `remedy` if it is damaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from pydantic import Field, field_validator

from stampede.data.errors import DataError
from stampede.data.formulas import bucket, bucket_rows, filled, flattened, flattened_weights, scaled
from stampede.data.learning.vocabulary import (
    COUNT,
    FIRST_ROW,
    KEPT,
    MISSING_ROW,
    ROW_SINCE,
    UNSEEN_ROW,
    VALUE,
    WAITING,
    Distinct,
    Grown,
    RowsOfIds,
    ValueCounts,
    alike,
    distinct_ids,
    grown,
    nothing_known,
    read_vocabulary,
    vocabulary,
)
from stampede.data.options import GrowthOptions
from stampede.data.parallel import computed_ahead
from stampede.data.prepared.manifest import FieldEntry
from stampede.data.schema.schema import (
    FEW_RARE,
    Hashed,
    IdField,
    Integers,
    NumberField,
    Quantiles,
    Schema,
    Vocabulary,
    column_of_weights,
    is_history,
    is_multi,
    settled,
    table_of,
    weights_column,
)
from stampede.files import read_file, sha256
from stampede.settings import Section, reading

LEARNED = "learned.json"

_REMEDY = "prepare the data again"

_PARTS_OF_TIME = {"hour_of_day": 24, "weekday": 7}


class NumberRange(Section):
    """Statistics of a number in the training part, after filling and `log1p`."""

    rows: int = 0
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of the squared distances from the mean

    @property
    def deviation(self) -> float:
        """Standard deviation; exactly 0 where all values are equal."""
        return math.sqrt(self.squares / self.rows) if self.high > self.low else 0.0

    def merged(self, other: NumberRange) -> NumberRange:
        """The statistics of both sets of values together (Chan, Golub and LeVeque 1983)."""
        if not self.rows or not other.rows:
            return self if self.rows else other
        rows = self.rows + other.rows
        apart = other.mean - self.mean
        return NumberRange(
            rows=rows,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            mean=self.mean + apart * other.rows / rows,
            squares=self.squares + other.squares + apart**2 * self.rows * other.rows / rows,
        )


def ranges(chunk: pl.DataFrame, fields: Mapping[str, NumberField]) -> dict[str, NumberRange]:
    """Statistics of the numbers in some rows."""
    if not len(chunk) or not fields:
        return {name: NumberRange() for name in fields}
    found = chunk.lazy().select(
        pl.struct(
            low=_filled(name, field).min(),
            high=_filled(name, field).max(),
            mean=_filled(name, field).mean(),
            squares=_filled(name, field).var(ddof=0) * len(chunk),
        ).alias(name)
        for name, field in fields.items()
    )
    row = found.collect().row(0, named=True)
    return {name: NumberRange(rows=len(chunk), **row[name]) for name in fields}


def _filled(name: str, field: NumberField) -> pl.Expr:
    return filled(pl.col(name), field.fill, field.transform or ())


def transformed(name: str, field: NumberField, seen: NumberRange) -> pl.Expr:
    """A column as an input of the network: Float32."""
    statistics = seen.low, seen.high, seen.mean, seen.deviation
    return scaled(_filled(name, field), field.transform, *statistics).alias(name)


def _frequent(rows: np.ndarray, buckets: int) -> tuple[list[int], set[int]]:
    """The places of values that are more than a bucket of the others, and of the edges around them.

    `rows`: `[n]`, in how many rows each value occurs, in the order of the values.
    """
    frequent, edges, left = [], set(), int(rows.sum())
    for place in np.argsort(-rows, kind="stable")[:buckets].tolist():
        around = edges | {place, place - 1}
        if rows[place] * (buckets - len(edges)) <= left or len(around - {-1}) >= buckets:
            break
        frequent.append(place)
        edges, left = around - {-1}, left - int(rows[place])
    return frequent, edges


def edges_of_quantiles(counts: Iterable[pl.DataFrame], buckets: int) -> list[float]:
    """The largest value of each bucket but the last, of at most `buckets`.

    Up to `buckets` distinct values have a bucket each. Of more, a value that is too frequent for a
    bucket has its own, and the others are divided by their quantiles: exact, equal ones merged. Of
    k, the j-th is the smallest value v such that a share of at least j / k of them is at most v.
    """
    tables = [table for table in counts if len(table)]
    if not tables:
        return []
    table = pl.concat(tables).sort(VALUE)
    values, rows = table[VALUE].to_numpy(), table[COUNT].to_numpy().astype(np.int64)
    if len(values) <= buckets:
        return [float(edge) for edge in values[:-1]]
    frequent, own = _frequent(rows, buckets)
    others, cumulative = np.delete(values, frequent), np.cumsum(np.delete(rows, frequent))
    k = buckets - len(own)
    # ceil(j * total / k), in integers.
    needed = np.array([-(-j * int(cumulative[-1]) // k) for j in range(1, k)], dtype=np.int64)
    found = np.union1d(others[np.searchsorted(cumulative, needed)], values[list(own)])
    return [float(edge) for edge in found if edge < values[-1]]


class Encoder(NamedTuple):
    """A field's table, and a function that gives the row of each value, `[n]` int64."""

    entry: FieldEntry
    rows: Callable[[pl.Series], np.ndarray]


def _encoder(name: str, field: IdField, saved: Saved, folder: Path, remedy: str) -> Encoder:
    missing, unseen = 0, None
    if isinstance(field, Vocabulary):
        ids = read_ids(folder, saved, name, remedy)
        encode = RowsOfIds(ids)
        if saved.schema_.rules == 1 and ids.str.contains(r"^-?\d+$").all():
            encode = partial(_rows_of_whole_ids, name, encode)
        rows, missing, unseen = FIRST_ROW + len(ids), MISSING_ROW, UNSEEN_ROW
    elif isinstance(field, Quantiles):
        edges = saved.quantiles[name]
        rows, encode = len(edges) + 2, partial(bucket_rows, edges=edges)
    else:
        # These learn nothing; the last row is for missing values.
        if isinstance(field, Hashed):
            missing = field.buckets
        else:
            missing = field.size if isinstance(field, Integers) else _PARTS_OF_TIME[field.encode]
        rows = missing + 1

        def encode(values: pl.Series) -> np.ndarray:
            if isinstance(field, Hashed):
                found = bucket(values, field.buckets, field.seed)
            else:
                found = values.fill_null(0).cast(pl.Int64).to_numpy().copy()
            if values.null_count():
                found[values.is_null().to_numpy()] = missing
            return found

    entry = FieldEntry(name=name, rows=rows, missing_row=missing, unseen_row=unseen)
    return Encoder(entry, encode)


def _rows_of_whole_ids(name: str, rows: RowsOfIds, values: pl.Series) -> np.ndarray:
    """Rows of ids. Refuses floats, as all known ids are whole numbers: none would be found."""
    if rows.size:
        is_float = values.str.ends_with(".0")
        if is_float.any() and is_float.all():
            raise DataError(
                f"field {name}: found ids such as {values.drop_nulls()[0]!r}, where those of the "
                "training are whole numbers; pandas makes floats of whole numbers with missing "
                "values: store the column as Int64 or as text"
            )
    return rows(values)


class EncodedBag(NamedTuple):
    """Ids of a multi-valued field for some rows.

    Attributes:
        lengths: `[n]` int64, ids of each row.
        values: `[ids]`, rows of its table.
        weights: `[ids]` float32, weight of each id; None if all are 1.
    """

    lengths: np.ndarray
    values: np.ndarray
    weights: np.ndarray | None = None

    def take(self, mask: np.ndarray) -> EncodedBag:
        """The rows where `mask` holds."""
        each = np.repeat(mask, self.lengths)
        weights = None if self.weights is None else self.weights[each]
        return EncodedBag(self.lengths[mask], self.values[each], weights)

    def arrays(self) -> dict[str, np.ndarray]:
        """What is stored for each id, by kind of array, see `ShardEntry`."""
        found = {"values": self.values}
        return found if self.weights is None else found | {"weights": self.weights}


class Learned:
    """Turns typed rows into arrays, by encoders of the id fields and ranges of the numbers."""

    def __init__(
        self,
        schema: Schema,
        encoders: Mapping[str, Encoder],
        ranges: Mapping[str, NumberRange],
        soft_labels: bool = False,
    ) -> None:
        self.schema, self.soft_labels = schema, soft_labels
        self._encoders = encoders
        self._numbers = [
            transformed(name, field, ranges[name]) for name, field in schema.numbers.items()
        ]
        entries = [encoders[name].entry for name in schema.ids]
        self.fields: list[FieldEntry] = sorted(entries, key=lambda entry: entry.multi)
        most = max(entry.rows for entry in entries)
        self.ids_dtype = "int32" if most <= 2**31 else "int64"

    def encode(
        self,
        frame: pl.DataFrame,
        numbers_dtype: str,
        distinct: Mapping[str, Distinct] | None = None,
    ) -> tuple[dict[str, np.ndarray], list[EncodedBag]]:
        """Encode typed rows (see `stampede.data.raw.log`).

        Args:
            distinct: the columns of `distinct_ids`, if `frame` lacks them.

        Returns:
            The arrays `ids` `[n, single-valued fields]` and `numbers` `[n, numbers]`; and each
            multi-valued field's ids.
        """
        if distinct is None:
            distinct = distinct_ids(frame, self.schema)
        single = [entry for entry in self.fields if not entry.multi]
        # Field by field, then transposed: three times as fast as writing into rows.
        ids = np.empty((len(single), len(frame)), dtype=self.ids_dtype)
        for i, entry in enumerate(single):
            encoder = self._encoders[entry.name]
            if entry.name in distinct:
                values, codes = distinct[entry.name]
                # No code is out of range; without mode="clip", numpy would copy `out`.
                np.take(encoder.rows(values).astype(ids.dtype), codes, out=ids[i], mode="clip")
            else:
                ids[i] = encoder.rows(frame[entry.name])
        bags = []
        for entry in self.fields[len(single) :]:
            lengths, values = flattened(frame[entry.name], entry.query is None)
            rows = self._encoders[entry.name].rows(values).astype(self.ids_dtype)
            weights = None
            if entry.weighted:
                weights = flattened_weights(frame[column_of_weights(entry.name)], lengths)
            bags.append(EncodedBag(lengths, rows, weights))
        numbers = np.empty((len(frame), 0), dtype=np.float32)
        if self._numbers:
            numbers = frame.lazy().select(self._numbers).collect().to_numpy(order="c")
        with np.errstate(over="ignore"):
            narrowed = np.ascontiguousarray(numbers, dtype=numbers_dtype)
        infinite = np.isinf(narrowed).any(0)
        if infinite.any():
            name = list(self.schema.numbers)[int(infinite.argmax())]
            largest = np.abs(numbers[:, infinite.argmax()]).max()
            raise DataError(
                f"number {name}: found {largest:g} after its transforms, too large for "
                f"{numbers_dtype}; write data.numbers_dtype=float32 (--set numbers_dtype=float32 "
                "to prepare by hand), or a transform such as minmax in the schema"
            )
        return {"ids": np.ascontiguousarray(ids.T), "numbers": narrowed}, bags


@dataclass(frozen=True)
class Growth:
    """How the vocabularies of a log grow from period to period."""

    options: GrowthOptions
    folder: Path | None = None  # what was learned up to the previous period
    before: Saved | None = None  # content of its `learned.json`

    @property
    def period(self) -> int:
        """Number of this period, from 1."""
        return 1 if self.before is None else self.before.period + 1

    @property
    def rows_before(self) -> int:
        """Training rows of earlier periods."""
        return 0 if self.before is None else self.before.rows

    def described(self) -> dict[str, Any]:
        """All that the vocabularies depend on besides the rows of this period."""
        files = [] if self.folder is None else sorted(self.folder.iterdir())
        return {
            **{name: getattr(self.options, name) for name in GrowthOptions.model_fields},
            "before": [[file.name, sha256(file)] for file in files],
        }

    def ids_before(self, field: str) -> Grown:
        """A field's ids after the previous period."""
        if self.before is None:
            return nothing_known()
        with reading(self.folder / LEARNED, DataError, _REMEDY):
            return Grown(
                read_vocabulary(self.folder / self.before.vocabularies[field], KEPT),
                read_vocabulary(self.folder / self.before.waiting[field], WAITING),
            )


class Measured(NamedTuple):
    """What `Learner` takes of the numbers of some rows."""

    rows: int
    ranges: Mapping[str, NumberRange]
    ranges_of_log1p: Mapping[str, NumberRange]


class Learner:
    """Counts ids and measures numbers.

    Args:
        budget: bytes of counts in memory; more go to the folder `spill`.
        growth: for a log in periods; ranges, quantiles and the settled schema are those of the
            first period.

    Attributes:
        rows: of the training part so far.
        soft_labels: whether some labels are between 0 and 1; set it before saving.
        notes: sentences for the user, once it has saved.
    """

    def __init__(
        self, schema: Schema, budget: int, spill: Path, growth: Growth | None = None
    ) -> None:
        self._schema = schema
        self._growth = growth
        self._before = None if growth is None else growth.before
        kinds = Vocabulary | Quantiles if self._before is None else Vocabulary
        counted = {
            name: table_of(name, f) for name, f in schema.ids.items() if isinstance(f, kinds)
        }
        self.counts = ValueCounts(counted, budget, spill)
        self.rows = 0
        self.soft_labels = False
        self.notes: list[str] = []
        self._numbers = schema.numbers if self._before is None else {}
        # Whether these numbers become logarithms is decided when all values are known.
        self._log1p = {
            name: field.model_copy(update={"transform": ["log1p"]})
            for name, field in self._numbers.items()
            if field.transform is None
        }
        self._ranges = {name: NumberRange() for name in self._numbers}
        self._ranges_of_log1p = {name: NumberRange() for name in self._log1p}

    def add(self, frame: pl.DataFrame, distinct: Mapping[str, Distinct]) -> None:
        """Learn from typed rows of the training part, and their other `distinct` columns."""
        self.counts.add(frame, distinct)
        self.merge(self.measured(frame))

    def measured(self, frame: pl.DataFrame) -> Measured:
        """The numbers of some typed rows of the training part."""
        return Measured(len(frame), ranges(frame, self._numbers), ranges(frame, self._log1p))

    def merge(self, found: Measured) -> None:
        """Learn the numbers of the next rows; their order decides the last bits of a mean."""
        self.rows += found.rows
        for seen, new in (
            (self._ranges, found.ranges),
            (self._ranges_of_log1p, found.ranges_of_log1p),
        ):
            for name, one in new.items():
                seen[name] = seen[name].merged(one)

    def save(self, folder: Path) -> Learned:
        """Write what was learned into a new folder, and load it."""
        folder.mkdir(parents=True)
        saved = self._before
        if saved is None:
            # Everything learned except the vocabularies.
            seen = self._ranges
            tails = {n: (seen[n].low, seen[n].high, seen[n].mean) for n in self._log1p}
            schema = settled(self._schema, self.rows, tails)
            chosen = {
                name: found
                for name, found in self._ranges_of_log1p.items()
                if "log1p" in schema.numbers[name].transform
            }
            quantiles = {
                name: edges_of_quantiles(self.counts.tables(name), field.buckets)
                for name, field in schema.ids.items()
                if isinstance(field, Quantiles)
            }
            saved = Saved(
                schema_=schema, ranges={**seen, **chosen}, quantiles=quantiles, vocabularies={}
            )
        ids = saved.schema_.ids
        tables = {
            n: table_of(n, field) for n, field in ids.items() if isinstance(field, Vocabulary)
        }
        files = {name: f"{table}.parquet" for name, table in tables.items()}
        waiting = {name: f"{table}.waiting.parquet" for name, table in tables.items()}
        with_rare_ids: set[str] = set()

        def write_vocabulary(name: str) -> list[str]:
            field, counts = ids[name], self.counts.tables(name)
            if self._growth is None:
                few = FEW_RARE * self.rows if self._schema.ids[name].min_count is None else 0.0
                table = vocabulary(counts, field, few)
                if len(table) and table[COUNT].min() < field.min_count:
                    with_rare_ids.add(name)
            else:
                growth = self._growth
                limits = (field.min_count, growth.options, field.max_size)
                after = grown(growth.ids_before(name), counts, growth.period, *limits)
                table = after.vocabulary
                after.waiting.write_parquet(folder / waiting[name])
            table.write_parquet(folder / files[name])
            return alike(table, name)

        for notes in computed_ahead(write_vocabulary, dict.fromkeys(tables.values()), 2, threads=2):
            self.notes += notes
        ids = {
            name: field.model_copy(update={"min_count": 1})
            if tables.get(name) in with_rare_ids
            else field
            for name, field in ids.items()
        }
        update = {"vocabularies": files, "rows": self.rows, "soft_labels": self.soft_labels}
        update["schema_"] = saved.schema_.model_copy(update={"ids": ids})
        if self._growth is not None:
            update["waiting"] = waiting
            update["period"] = self._growth.period
            update["rows"] += self._growth.rows_before
        text = saved.model_copy(update=update).model_dump_json(indent=1)
        (folder / LEARNED).write_text(text, encoding="utf-8")
        return load(folder)


class Saved(Section):
    """The content of `learned.json`."""

    schema_: Schema
    ranges: dict[str, NumberRange]
    quantiles: dict[str, list[float]]  # inner edges, by field
    vocabularies: dict[str, str]  # file in the same folder, by field
    period: int = 0  # number of the newest period; 0 for a log without periods
    # File of the ids that wait for a row, by field.
    waiting: dict[str, str] = Field(default_factory=dict)
    rows: int = 0  # training rows of all periods
    soft_labels: bool = False  # whether some labels are between 0 and 1

    @field_validator("schema_", mode="before")
    @classmethod
    def _of_older_versions(cls, schema: Any) -> Any:
        return {"rules": 1, **schema} if isinstance(schema, dict) else schema


def read_saved(folder: Path, remedy: str = _REMEDY) -> Saved:
    """The content of `learned.json`."""
    path = folder / LEARNED
    with reading(path, DataError, remedy):
        return Saved.model_validate_json(read_file(path))


def load(folder: Path, remedy: str = _REMEDY) -> Learned:
    """Load what `Learner.save` wrote."""
    saved = read_saved(folder, remedy)
    with reading(folder / LEARNED, DataError, remedy):
        ids = saved.schema_.ids.items()
        encoders: dict[str, Encoder] = {}
        # First those of fields with tables of their own.
        for name, field in sorted(ids, key=lambda one: table_of(*one) != one[0]):
            table = table_of(name, field)
            if table == name:
                encoders[name] = _encoder(name, field, saved, folder, remedy)
            update = {
                "name": name,
                "multi": is_multi(field),
                "table": None if table == name else table,
                "pooling": getattr(field, "pooling", "sum"),
                "weighted": weights_column(field) is not None,
                "query": getattr(field, "query", None),
            }
            if is_history(field):
                # Cells without ids stay empty.
                update["missing_row"] = None
            entry = encoders[table].entry.model_copy(update=update)
            encoders[name] = encoders[table]._replace(entry=entry)
        return Learned(saved.schema_, encoders, saved.ranges, saved.soft_labels)


def read_ids(folder: Path, saved: Saved, field: str, remedy: str = _REMEDY) -> pl.Series:
    """The ids of a field's vocabulary, String, in the order of their rows."""
    with reading(folder / LEARNED, DataError, remedy):
        return read_vocabulary(folder / saved.vocabularies[field])[VALUE]


def rows_of_new_ids(folder: Path, remedy: str = _REMEDY) -> dict[str, np.ndarray]:
    """Rows that went to new ids in the newest period of a log, by field of a vocabulary."""
    saved, found = read_saved(folder, remedy), {}
    with reading(folder / LEARNED, DataError, remedy):
        for name, file in saved.vocabularies.items():
            since = read_vocabulary(folder / file, [ROW_SINCE])[ROW_SINCE]
            found[name] = np.flatnonzero((since == saved.period).to_numpy()) + FIRST_ROW
    return found
