"""What was learned, saved beside the data, and its use on rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from pydantic import ValidationError, field_validator

from stampede.data.errors import DataError
from stampede.data.formulas import flattened
from stampede.data.learning.distinct import Distinct, distinct_ids
from stampede.data.learning.encoders import (
    Encoder,
    fixed_encoder,
    is_multi,
    quantile_encoder,
    vocabulary_encoder,
)
from stampede.data.learning.numbers import NumberRange, transformed
from stampede.data.learning.vocabulary import FIRST_ROW
from stampede.data.learning.vocabulary_file import read_values
from stampede.data.prepared.manifest import FieldEntry
from stampede.data.prepared.short_file import NoShortFileError, read_short
from stampede.data.schema import Schema
from stampede.data.schema.columns import Quantiles, Vocabulary
from stampede.settings import Section, cut

LEARNED = "learned.json"

_REMEDY = "prepare the data again"


class Saved(Section):
    """The content of `learned.json`.

    Attributes:
        schema_: of the rows.
        ranges: of every number, by name.
        quantiles: inner edges of the fields cut at quantiles, by name.
        vocabularies: file of each vocabulary, in the same folder, by field.
    """

    schema_: Schema
    ranges: dict[str, NumberRange]
    quantiles: dict[str, list[float]]
    vocabularies: dict[str, str]

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
        """Arrays of some typed rows (see `stampede.data.raw.typed`).

        Args:
            frame: the rows, or them `hashed`.
            numbers_dtype: type of the numbers.
            distinct: the fields that `distinct_ids` gives, where `frame` lacks them; their values
                may be `hashes`.
        """
        if distinct is None:
            distinct = distinct_ids(frame, self.schema)
        single = [entry for entry in self.fields if not entry.multi]
        # A field in one piece of memory: to write with the stride of a row takes three times as
        # long as to turn the whole.
        ids = np.empty((len(single), len(frame)), dtype=self.ids_dtype)
        for i, entry in enumerate(single):
            if entry.name in distinct:
                self._rows_of_distinct(entry, distinct[entry.name], out=ids[i])
            else:
                ids[i] = self._encoders[entry.name].rows(frame[entry.name])
        bags = [self._bag(entry, frame) for entry in self.fields if entry.multi]
        if self._numbers:
            numbers = frame.lazy().select(self._numbers).collect().to_numpy(order="c")
        else:
            numbers = np.empty((len(frame), 0), dtype=np.float32)
        ids = np.ascontiguousarray(ids.T)
        return Encoded(ids, bags, self._narrowed(numbers, numbers_dtype))

    def _rows_of_distinct(self, entry: FieldEntry, column: Distinct, out: np.ndarray) -> None:
        rows = self._encoders[entry.name].rows(column.values).astype(out.dtype)
        # All codes are within; without "clip", numpy copies `out`.
        np.take(rows, column.codes, out=out, mode="clip")

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


def save(
    folder: Path,
    schema: Schema,
    ranges: Mapping[str, NumberRange],
    quantiles: Mapping[str, list[float]],
    vocabularies: Mapping[str, str],
) -> None:
    """Write `learned.json`; `vocabularies` names the file of each such field."""
    saved = Saved(
        schema_=schema,
        ranges=dict(ranges),
        quantiles=dict(quantiles),
        vocabularies=dict(vocabularies),
    )
    (folder / LEARNED).write_text(saved.model_dump_json(indent=1), encoding="utf-8")


def read_saved(folder: Path, remedy: str = _REMEDY) -> Saved:
    """What `save` wrote.

    Args:
        remedy: what to do where it is damaged.

    Raises:
        DataError: the folder is damaged.
    """
    path = folder / LEARNED
    try:
        return Saved.model_validate_json(read_short(path))
    except (OSError, NoShortFileError) as failure:
        raise _damaged(path, failure, remedy) from None
    except ValidationError as failure:
        raise _damaged(path, failure.errors(include_url=False)[0]["msg"], remedy) from None


def load(
    folder: Path, remedy: str = _REMEDY, fields: Sequence[FieldEntry] | None = None
) -> Learned:
    """What `save` and the vocabularies' files say.

    Args:
        remedy: what to do where the folder is damaged.
        fields: of its manifest; a vocabulary that holds more or fewer ids is not read. None where
            there is no manifest yet.

    Raises:
        DataError: the folder is damaged.
    """
    saved = read_saved(folder, remedy)
    rows = None if fields is None else {entry.name: entry.rows for entry in fields}
    schema = saved.schema_
    try:
        encoders = {}
        for name, field in schema.ids.items():
            if isinstance(field, Vocabulary):
                size = None if rows is None else rows[name] - FIRST_ROW
                values = read_values(folder / _plain(saved.vocabularies[name]), size)
                encoders[name] = vocabulary_encoder(name, values, is_multi(field))
            elif isinstance(field, Quantiles):
                encoders[name] = quantile_encoder(name, saved.quantiles[name])
            else:
                encoders[name] = fixed_encoder(name, field)
        return Learned(schema, encoders, saved.ranges)
    # pydantic's are ValueErrors.
    except (OSError, KeyError, ValueError, pl.exceptions.PolarsError) as failure:
        raise _damaged(folder / LEARNED, failure, remedy) from None


def read_vocabulary(
    folder: Path, saved: Saved, field: str, size: int, remedy: str = _REMEDY
) -> pl.Series:
    """The ids of a field's vocabulary, String, in the order of their rows.

    Args:
        saved: what `read_saved` read of the folder.
        size: of the vocabulary; a file that holds more or fewer is not read.
        remedy: what to do where it is damaged.

    Raises:
        DataError: it is damaged.
    """
    try:
        return read_values(folder / _plain(saved.vocabularies[field]), size)
    except (OSError, KeyError, ValueError, pl.exceptions.PolarsError) as failure:
        raise _damaged(folder / LEARNED, failure, remedy) from None


def _damaged(path: Path, reason: object, remedy: str) -> DataError:
    lines = str(reason).splitlines() or [type(reason).__name__]
    return DataError(f"{path}: damaged ({cut(lines[0])}); {remedy}")


def _plain(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise KeyError(f"{name!r} is no file of this folder")
    return name
