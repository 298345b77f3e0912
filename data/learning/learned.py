"""What is learned from the training part, a chunk at a time; saved, and applied to rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from pydantic import Field, field_validator, model_validator

from stampede.data.errors import DataError
from stampede.data.formulas import bucket, bucket_rows, filled, flattened, scaled
from stampede.data.learning.growth import KEPT, ROW_SINCE, WAITING, Grown, grown, nothing_known
from stampede.data.learning.vocabulary import (
    COUNT,
    FIRST_ROW,
    MISSING_ROW,
    UNSEEN_ROW,
    VALUE,
    Distinct,
    RowsOfIds,
    ValueCounts,
    distinct_ids,
    read_vocabulary,
    vocabulary,
)
from stampede.data.options import GrowthOptions
from stampede.data.parallel import computed_ahead
from stampede.data.prepared.manifest import FieldEntry
from stampede.data.schema.features import settled
from stampede.data.schema.schema import (
    Hashed,
    IdField,
    Integers,
    NumberField,
    Quantiles,
    Schema,
    Vocabulary,
    is_multi,
)
from stampede.files import read_file, sha256
from stampede.settings import Section, reading

LEARNED = "learned.json"

_REMEDY = "prepare the data again"

_PARTS_OF_TIME = {"hour_of_day": 24, "weekday": 7}


class NumberRange(Section):
    """A number in the training part, after filling and `log1p`.

    Attributes:
        rows: values seen.
        low, high: smallest and largest.
        mean: arithmetic mean.
        squares: sum of the squared distances from the mean.
    """

    rows: int = Field(0, ge=0, lt=2**62)
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    squares: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _a_range_is_of_rows(self) -> NumberRange:
        if self.low > self.high or (self.low < self.high and not self.rows):
            raise ValueError(f"{self.rows} values from {self.low:g} to {self.high:g}")
        return self

    @property
    def deviation(self) -> float:
        """Standard deviation; 0 for one value, whose squares may be more by rounding."""
        return math.sqrt(self.squares / self.rows) if self.high > self.low else 0.0

    def merged(self, other: NumberRange) -> NumberRange:
        """Of both sets of values (Chan, Golub and LeVeque 1983)."""
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
    """Ranges of the numbers in some rows."""
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
    """The network's input of a column: Float32."""
    statistics = seen.low, seen.high, seen.mean, seen.deviation
    return scaled(_filled(name, field), field.transform, *statistics).alias(name)


def edges_of_quantiles(counts: Iterable[pl.DataFrame], buckets: int) -> list[float]:
    """Values where a new bucket begins: the inner `buckets`-quantiles, exact, ties merged.

    The j-th is the smallest value v such that a share of at least j / buckets is at most v; the
    bucket above begins after it.
    """
    tables = [table for table in counts if len(table)]
    if not tables:
        return []
    table = pl.concat(tables).sort(VALUE)
    values = table[VALUE].to_numpy()
    cumulative = np.cumsum(table[COUNT].to_numpy().astype(np.int64))
    total = int(cumulative[-1])
    # Whole numbers: ceil(j * total / buckets), without rounding.
    needed = np.array([-(-j * total // buckets) for j in range(1, buckets)], dtype=np.int64)
    found = np.unique(values[np.searchsorted(cumulative, needed)])
    return [float(edge) for edge in found if edge < values[-1]]


class Encoder(NamedTuple):
    """A field's table, and the row of each value of a Series, `[n]` int64."""

    entry: FieldEntry
    rows: Callable[[pl.Series], np.ndarray]


def vocabulary_encoder(name: str, values: pl.Series, multi: bool) -> Encoder:
    """Of ids with a row each; `values` String."""
    rows = RowsOfIds(values)
    entry = FieldEntry(
        name=name,
        rows=FIRST_ROW + rows.size,
        missing_row=MISSING_ROW,
        unseen_row=UNSEEN_ROW,
        multi=multi,
    )
    return Encoder(entry, rows)


def fixed_encoder(name: str, field: IdField) -> Encoder:
    """Of a field for which nothing is learned. The row after the last is for a missing value."""
    if isinstance(field, Hashed):
        size = field.buckets
    else:
        size = field.size if isinstance(field, Integers) else _PARTS_OF_TIME[field.encode]

    def rows(values: pl.Series) -> np.ndarray:
        if isinstance(field, Hashed):
            found = bucket(values, field.buckets, field.seed)
        else:
            found = values.fill_null(0).cast(pl.Int64).to_numpy().copy()
        if values.null_count():
            found[values.is_null().to_numpy()] = size
        return found

    entry = FieldEntry(name=name, rows=size + 1, missing_row=size, multi=is_multi(field))
    return Encoder(entry, rows)


@dataclass(frozen=True)
class Encoded:
    """Rows as arrays.

    Attributes:
        ids: `[n, single-valued fields]`.
        bags: of each multi-valued field, `lengths` `[n]` and `values`.
        numbers: `[n, numbers]`.
    """

    ids: np.ndarray
    bags: list[tuple[np.ndarray, np.ndarray]]
    numbers: np.ndarray


class Learned:
    """Turns typed rows into arrays.

    Args:
        schema: of the rows.
        encoders: of every id field, by name.
        ranges: of every number, by name.
    """

    def __init__(
        self, schema: Schema, encoders: Mapping[str, Encoder], ranges: Mapping[str, NumberRange]
    ) -> None:
        self.schema = schema
        self._encoders = encoders
        self._numbers = [
            transformed(name, field, ranges[name]) for name, field in schema.numbers.items()
        ]
        entries = [encoders[name].entry for name in schema.ids]
        self.fields: list[FieldEntry] = sorted(entries, key=lambda entry: entry.multi)

    @property
    def ids_dtype(self) -> str:
        """The narrower of int32 and int64 that holds every row."""
        return "int32" if max(entry.rows for entry in self.fields) <= 2**31 else "int64"

    @property
    def takes_hashes(self) -> bool:
        """Whether `encode` takes rows with hashes of ids instead of their texts."""
        return all(getattr(e.rows, "takes_hashes", True) for e in self._encoders.values())

    def encode(
        self,
        frame: pl.DataFrame,
        numbers_dtype: str,
        distinct: Mapping[str, Distinct] | None = None,
    ) -> Encoded:
        """Arrays of some typed rows (see `stampede.data.raw.log`).

        Args:
            frame: the rows, or them `hashed`.
            numbers_dtype: type of the numbers.
            distinct: the fields that `distinct_ids` gives, where `frame` lacks them; their values
                may be `hashes`.
        """
        if distinct is None:
            distinct = distinct_ids(frame, self.schema)
        single = [entry for entry in self.fields if not entry.multi]
        # Each field in one piece of memory: to write with the stride of a row takes three times as
        # long as to transpose the whole.
        ids = np.empty((len(single), len(frame)), dtype=self.ids_dtype)
        for i, entry in enumerate(single):
            encoder = self._encoders[entry.name]
            if entry.name in distinct:
                values, codes = distinct[entry.name]
                # All codes are within; without "clip", numpy copies `out`.
                np.take(encoder.rows(values).astype(ids.dtype), codes, out=ids[i], mode="clip")
            else:
                ids[i] = encoder.rows(frame[entry.name])
        bags = [self._bag(entry, frame) for entry in self.fields if entry.multi]
        if self._numbers:
            numbers = frame.lazy().select(self._numbers).collect().to_numpy(order="c")
        else:
            numbers = np.empty((len(frame), 0), dtype=np.float32)
        ids = np.ascontiguousarray(ids.T)
        return Encoded(ids, bags, self._narrowed(numbers, numbers_dtype))

    def _narrowed(self, numbers: np.ndarray, dtype: str) -> np.ndarray:
        with np.errstate(over="ignore"):
            narrowed = np.ascontiguousarray(numbers, dtype=dtype)
        infinite = np.isinf(narrowed).any(0)
        if infinite.any():
            name = list(self.schema.numbers)[int(infinite.argmax())]
            largest = np.abs(numbers[:, infinite.argmax()]).max()
            raise DataError(
                f"number {name}: found {largest:g} after its transforms, too large for {dtype}; "
                "write data.numbers_dtype=float32 (--set numbers_dtype=float32 to prepare by "
                "hand), or a transform such as minmax in the schema"
            )
        return narrowed

    def _bag(self, entry: FieldEntry, frame: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """A cell without an id has one, the missing value's."""
        lengths, ids = flattened(frame[entry.name])
        return lengths, self._encoders[entry.name].rows(ids).astype(self.ids_dtype)


@dataclass(frozen=True)
class Growth:
    """A log that comes in periods, whose vocabularies grow.

    Attributes:
        options: who gets a row.
        before: what was learned up to the period before; None in the first.
    """

    options: GrowthOptions
    before: Before | None = None

    @property
    def period(self) -> int:
        """Its number, from 1."""
        return 1 if self.before is None else self.before.saved.period + 1

    @property
    def rows_before(self) -> int:
        """Training rows of the periods before."""
        return 0 if self.before is None else self.before.saved.rows

    def described(self) -> dict[str, Any]:
        """All that the vocabularies depend on besides the log of this period."""
        files = [] if self.before is None else sorted(self.before.folder.iterdir())
        return {
            **{name: getattr(self.options, name) for name in GrowthOptions.model_fields},
            "before": [[file.name, sha256(file)] for file in files],
        }


class Before(NamedTuple):
    """What was learned up to a period: a folder that `Learner.save` wrote, and what it says."""

    folder: Path
    saved: Saved

    def field(self, name: str) -> Grown:
        """A field's ids.

        Raises:
            DataError: the folder is damaged.
        """
        with reading(self.folder / LEARNED, DataError, _REMEDY):
            return Grown(
                read_vocabulary(self.folder / _plain(self.saved.vocabularies[name]), KEPT),
                read_vocabulary(self.folder / _plain(self.saved.waiting[name]), WAITING),
            )


class Learner:
    """Counts ids and finds ranges.

    Args:
        schema: of the rows.
        budget: bytes of counts in memory.
        spill: folder for counts above it.
        growth: where the log comes in periods. What the first one has settled stays: ranges,
            quantiles, the choices of the schema.

    Attributes:
        rows: seen so far.
    """

    def __init__(
        self, schema: Schema, budget: int, spill: Path, growth: Growth | None = None
    ) -> None:
        self._schema = schema
        self._growth = growth
        self._before = None if growth is None else growth.before
        kinds = Vocabulary | Quantiles if self._before is None else Vocabulary
        counted = [name for name, field in schema.ids.items() if isinstance(field, kinds)]
        self.counts = ValueCounts(counted, budget, spill)
        self.rows = 0
        self._numbers = schema.numbers if self._before is None else {}
        # Whether a number's logarithm is taken may be open until all values are seen.
        self._log1p = {
            name: field.model_copy(update={"transform": ["log1p"]})
            for name, field in self._numbers.items()
            if field.transform is None
        }
        self._ranges = {name: NumberRange() for name in self._numbers}
        self._ranges_of_log1p = {name: NumberRange() for name in self._log1p}

    def add(self, frame: pl.DataFrame, distinct: Mapping[str, Distinct] | None = None) -> None:
        """Typed rows of the training part (see `stampede.data.raw.log`).

        Args:
            distinct: the columns that `frame` lacks.
        """
        self.rows += len(frame)
        self.counts.add(frame, distinct)
        for seen, fields in (
            (self._ranges, self._numbers),
            (self._ranges_of_log1p, self._log1p),
        ):
            for name, found in ranges(frame, fields).items():
                seen[name] = seen[name].merged(found)

    def save(self, folder: Path) -> Learned:
        """Write what was learned into a new folder, field by field, and read it back."""
        folder.mkdir(parents=True)
        saved = self._settled() if self._before is None else self._before.saved
        ids = saved.schema_.ids
        files = {name: f"{name}.parquet" for name, f in ids.items() if isinstance(f, Vocabulary)}
        waiting = {name: f"{name}.waiting.parquet" for name in files if self._growth is not None}

        def write_vocabulary(name: str) -> None:
            field, counts = ids[name], self.counts.tables(name)
            if self._growth is None:
                vocabulary(counts, field).write_parquet(folder / files[name])
                return
            growth, before = self._growth, self._before
            known = nothing_known() if before is None else before.field(name)
            size = (field.min_count, growth.options, field.max_size)
            after = grown(known, counts, growth.period, *size)
            after.vocabulary.write_parquet(folder / files[name])
            after.waiting.write_parquet(folder / waiting[name])

        for _ in computed_ahead(write_vocabulary, files, 2, threads=2):
            pass
        period = 0 if self._growth is None else self._growth.period
        rows = self.rows + (0 if self._before is None else self._before.saved.rows)
        update = {"vocabularies": files, "waiting": waiting, "period": period, "rows": rows}
        text = saved.model_copy(update=update).model_dump_json(indent=1)
        (folder / LEARNED).write_text(text, encoding="utf-8")
        return load(folder)

    def _settled(self) -> Saved:
        """What was learned besides vocabularies."""
        seen = {name: self._ranges[name] for name in self._log1p}
        tails = {name: (found.low, found.high, found.mean) for name, found in seen.items()}
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
        return Saved(
            schema_=schema,
            ranges={**self._ranges, **chosen},
            quantiles=quantiles,
            vocabularies={},
        )


class Saved(Section):
    """The content of `learned.json`.

    Attributes:
        schema_: of the rows.
        ranges: of every number, by name.
        quantiles: inner edges of the fields cut at quantiles, by name.
        vocabularies: file of each vocabulary, in the same folder, by field.
        period: number of the newest period of a log that comes in periods; else 0.
        waiting: there, file of the ids that wait for a row, by field.
        rows: that were learned from, in all periods.
    """

    schema_: Schema
    ranges: dict[str, NumberRange]
    quantiles: dict[str, list[float]]
    vocabularies: dict[str, str]
    period: int = Field(0, ge=0, lt=2**31)
    waiting: dict[str, str] = Field(default_factory=dict)
    rows: int = Field(0, ge=0, lt=2**62)

    @field_validator("schema_")
    @classmethod
    def _has_label(cls, schema: Schema) -> Schema:
        # Only rows that are to be scored come without one.
        if schema.label is None:
            raise ValueError("the schema names no label")
        return schema

    @field_validator("quantiles")
    @classmethod
    def _edges_ascend(cls, quantiles: dict[str, list[float]]) -> dict[str, list[float]]:
        for name, edges in quantiles.items():
            if edges != sorted(set(edges)):
                raise ValueError(f"the edges of {name!r} do not ascend")
        return quantiles


def read_saved(folder: Path, remedy: str = _REMEDY) -> Saved:
    """The content of `learned.json`.

    Args:
        remedy: what to do where it is damaged.

    Raises:
        DataError: the folder is damaged.
    """
    path = folder / LEARNED
    with reading(path, DataError, remedy):
        return Saved.model_validate_json(read_file(path))


def load(
    folder: Path, remedy: str = _REMEDY, fields: Sequence[FieldEntry] | None = None
) -> Learned:
    """What `Learner.save` wrote.

    Args:
        remedy: what to do where the folder is damaged.
        fields: of its manifest, whose rows the vocabularies must have; None where there is no
            manifest yet.

    Raises:
        DataError: the folder is damaged.
    """
    saved = read_saved(folder, remedy)
    rows = None if fields is None else {entry.name: entry.rows for entry in fields}
    schema = saved.schema_
    with reading(folder / LEARNED, DataError, remedy):
        encoders = {}
        for name, field in schema.ids.items():
            if isinstance(field, Vocabulary):
                size = None if rows is None else rows[name] - FIRST_ROW
                values = read_vocabulary(folder / _plain(saved.vocabularies[name]), size=size)
                encoders[name] = vocabulary_encoder(name, values[VALUE], is_multi(field))
            elif isinstance(field, Quantiles):
                edges = saved.quantiles[name]
                entry = FieldEntry(name=name, rows=len(edges) + 2, missing_row=0)
                encoders[name] = Encoder(entry, partial(bucket_rows, edges=edges))
            else:
                encoders[name] = fixed_encoder(name, field)
        return Learned(schema, encoders, saved.ranges)


def read_ids(folder: Path, saved: Saved, field: str, size: int, remedy: str = _REMEDY) -> pl.Series:
    """The ids of a field's vocabulary, String, in the order of their rows.

    Args:
        saved: what `read_saved` read of the folder.
        size: ids that there must be.
        remedy: what to do where the folder is damaged.

    Raises:
        DataError: it is damaged.
    """
    with reading(folder / LEARNED, DataError, remedy):
        return read_vocabulary(folder / _plain(saved.vocabularies[field]), size=size)[VALUE]


def rows_of_new_ids(
    folder: Path, fields: Sequence[FieldEntry], remedy: str = _REMEDY
) -> dict[str, np.ndarray]:
    """The rows that went to new ids in the newest period, by field of a vocabulary.

    Args:
        folder: of a log that comes in periods.
        fields: of its manifest.
        remedy: what to do where the folder is damaged.

    Raises:
        DataError: it is damaged.
    """
    saved = read_saved(folder, remedy)
    rows, found = {entry.name: entry.rows for entry in fields}, {}
    with reading(folder / LEARNED, DataError, remedy):
        for name, file in saved.vocabularies.items():
            size, column = rows[name] - FIRST_ROW, {ROW_SINCE: pl.Int32}
            since = read_vocabulary(folder / _plain(file), column, size)[ROW_SINCE]
            found[name] = np.flatnonzero((since == saved.period).to_numpy()) + FIRST_ROW
    return found


def _plain(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"{name!r} is no file of this folder")
    return name
