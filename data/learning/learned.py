"""What was learned from the training part: saves and loads it, and encodes rows by it.

Functions that read a folder raise a `DataError` with `remedy` if it is damaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from pydantic import Field

from stampede.data.errors import DataError
from stampede.data.formulas import bucket, bucket_rows, filled, flattened, flattened_weights, scaled
from stampede.data.learning import VALUE
from stampede.data.learning.rows_of_ids import (
    FIRST_ROW,
    MISSING_ROW,
    UNSEEN_ROW,
    RowsOfIds,
)
from stampede.data.learning.sorting import COUNTED, read_pieces
from stampede.data.learning.value_counts import Distinct, distinct_ids
from stampede.data.learning.vocabulary import ROW_SINCE, read_vocabulary
from stampede.data.prepared.manifest import FieldEntry
from stampede.data.schema.schema import (
    MISSING,
    Hashed,
    IdField,
    Integers,
    NumberField,
    Quantiles,
    Schema,
    Vocabulary,
    column_of_weights,
    rules_of,
)
from stampede.files import parse_json, read_file
from stampede.settings import Section, reading

LEARNED = "learned.json"

# In an unfinished prepared folder: what is needed until its rows are written, and in there the
# files of `RowsOfIds`.
COUNTS, INDEXES = "counts", "indexes"

REMEDY = "prepare the data again"

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


def filled_number(name: str, field: NumberField) -> pl.Expr:
    """A number before its statistics are taken or applied, see `filled`."""
    return filled(pl.col(name), field.fill, field.transform or ())


def transformed(name: str, field: NumberField, seen: NumberRange) -> pl.Expr:
    """A column as an input of the network: Float32."""
    statistics = seen.low, seen.high, seen.mean, seen.deviation
    return scaled(filled_number(name, field), field.transform, *statistics).alias(name)


class Encoder(NamedTuple):
    """A field's table, and a function that gives the row of each value, `[n]` int64."""

    entry: FieldEntry
    rows: Callable[[pl.Series], np.ndarray]


def _encoder(
    name: str, field: IdField, saved: Saved, folder: Path, indexes: Path | None
) -> Encoder:
    missing, unseen = 0, None
    if isinstance(field, Vocabulary):
        encode = RowsOfIds(
            IdsInPieces(folder / saved.vocabularies[name]),
            None if indexes is None else indexes / name,
        )
        rows, missing, unseen = FIRST_ROW + encode.size, MISSING_ROW, UNSEEN_ROW
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
        infinite = np.isinf(narrowed)
        if infinite.any():
            at = int(infinite.any(0).argmax())
            name, largest = list(self.schema.numbers)[at], np.abs(numbers[:, at]).max()
            raise DataError(
                f"number {name}: found {largest:g} after its transforms, too large for "
                f"{numbers_dtype}; write data.numbers_dtype=float32 (--set numbers_dtype=float32 "
                "to prepare by hand), or a transform such as minmax in the schema"
            )
        return {"ids": np.ascontiguousarray(ids.T), "numbers": narrowed}, bags


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


def read_saved(folder: Path, remedy: str = REMEDY) -> Saved:
    """The content of `learned.json`."""
    path = folder / LEARNED
    with reading(path, DataError, remedy):
        content = read_file(path)
        schema = parse_json(content)["schema_"]
        rules, known = schema.get("rules", 1), rules_of(schema.get("missing", MISSING))
        if rules != known:
            raise DataError(
                f"{path}: an older version of stampede prepared it, which read numbers, booleans "
                f"or times in another way (rules {rules} instead of {known}); prepare the log and "
                "train again, or use that version"
            )
        return Saved.model_validate_json(content)


def load(folder: Path, remedy: str = REMEDY, indexes: Path | None = None) -> Learned:
    """Load what `Learner.save` wrote.

    Args:
        indexes: a folder for the files of `RowsOfIds`; without it they are in memory.
    """
    saved = read_saved(folder, remedy)
    with reading(folder / LEARNED, DataError, remedy):
        ids = saved.schema_.ids.items()
        encoders: dict[str, Encoder] = {}
        # First those of fields with tables of their own.
        for name, field in sorted(ids, key=lambda one: one[1].share is not None):
            table = field.share or name
            if table == name:
                encoders[name] = _encoder(name, field, saved, folder, indexes)
            update = {
                "name": name,
                "multi": field.separator is not None,
                "table": field.share,
                "pooling": field.pooling,
                "weighted": field.weights is not None,
                "query": field.query,
            }
            if field.query is not None:
                # Cells without ids stay empty.
                update["missing_row"] = None
            entry = encoders[table].entry.model_copy(update=update)
            encoders[name] = encoders[table]._replace(entry=entry)
        return Learned(saved.schema_, encoders, saved.ranges, saved.soft_labels)


class IdsInPieces(NamedTuple):
    """The ids of a vocabulary's file in the order of their rows: some at a time, as often as asked.

    Raises OSError or ValueError if it is damaged.
    """

    path: Path
    rows: int = 1 << 18

    def __iter__(self) -> Iterator[pl.Series]:
        ids = COUNTED.select(VALUE)
        return (piece[VALUE] for piece in read_pieces(self.path, self.rows, ids))


def read_ids(folder: Path, saved: Saved, field: str, remedy: str = REMEDY) -> pl.Series:
    """The ids of a field's vocabulary, String, in the order of their rows."""
    with reading(folder / LEARNED, DataError, remedy):
        return read_vocabulary(folder / saved.vocabularies[field])[VALUE]


def rows_of_new_ids(folder: Path, remedy: str = REMEDY) -> dict[str, np.ndarray]:
    """Rows that went to new ids in the newest period of a log, by field of a vocabulary."""
    saved, found = read_saved(folder, remedy), {}
    with reading(folder / LEARNED, DataError, remedy):
        for name, file in saved.vocabularies.items():
            since = read_vocabulary(folder / file, [ROW_SINCE])[ROW_SINCE]
            found[name] = np.flatnonzero((since == saved.period).to_numpy()) + FIRST_ROW
    return found
