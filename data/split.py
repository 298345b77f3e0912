"""Which rows of a log are the training, the validation and the test part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from stampede.data.formulas import written_alike
from stampede.data.learning.value_counts import Distinct, distinct_ids
from stampede.data.order import Permutation
from stampede.data.prepared.manifest import TEST, TRAIN, VALIDATION
from stampede.data.raw.log import Chunk
from stampede.data.raw.typed import SPLIT
from stampede.data.schema.schema import Schema
from stampede.data.sources import LAST_FILE, Source


@dataclass(frozen=True)
class Assignment:
    """Assigns the rows of a log to parts."""

    source: Source
    counts: Sequence[int] | None  # rows of each file; may be None unless `split.needs_counts()`

    def parts(self, chunk: Chunk) -> np.ndarray:
        """`TRAIN`, `VALIDATION` or `TEST` for each row of a chunk: `[n]` int8."""
        split = self.source.split
        if split.split == "periods":
            return np.full(len(chunk.numbers), TRAIN, dtype=np.int8)
        if split.split == "sequential":
            train, validation, _ = self._sizes()
            return np.digitize(self._rows(chunk), [train, train + validation]).astype(np.int8)
        if split.split in ("random", "highfreq"):
            _, validation, test = self._sizes()
            part = np.digitize(self._shuffled(chunk), [test, test + validation])
            return np.array([TEST, VALIDATION, TRAIN], dtype=np.int8)[part]
        if split.split == "files":
            parts = np.full(len(chunk.numbers), self.source.file_parts[chunk.file], dtype=np.int8)
        else:
            values = chunk.frame[SPLIT]
            test = values.is_in(_as_in_cells(split.test_values)).fill_null(False)
            if split.test_from is not None:
                test = test | _is_from(values.fill_null(""), split.test_from)
            named = values.is_in(_as_in_cells(split.validation_values)).fill_null(False)
            parts = np.where(test.to_numpy(), TEST, np.where(named.to_numpy(), VALIDATION, TRAIN))
            parts = parts.astype(np.int8)
        if split.needs_counts():
            held = self._shuffled(chunk) < int(split.validation_fraction * self._total())
            parts[(parts == TRAIN) & held] = VALIDATION
        return parts

    def _rows(self, chunk: Chunk) -> np.ndarray:
        """Number of each row in the whole log."""
        return chunk.numbers + sum(self.counts[: chunk.file])

    def _total(self) -> int:
        """Number of rows to divide at random; with split `files`, rows of the training files."""
        parts = self.source.file_parts or [TRAIN] * len(self.counts)
        return sum(count for count, part in zip(self.counts, parts, strict=True) if part == TRAIN)

    def _sizes(self) -> tuple[int, int, int]:
        """Rows of the training, validation and test part."""
        rows, split = self._total(), self.source.split
        share = self.source.test_share if split.test_fraction is None else split.test_fraction
        if share == LAST_FILE:
            trained = rows - self.counts[-1]
        elif split.split == "sequential":
            trained = int((1 - share) * rows)
        else:
            trained = rows - int(share * rows)
        validation = int(split.validation_fraction * trained)
        return trained - validation, validation, rows - trained

    def _shuffled(self, chunk: Chunk) -> np.ndarray:
        """Each row's place in a random order."""
        total = self._total()
        rows = self._rows(chunk)
        within = rows < total
        places = np.full(len(rows), total, dtype=np.int64)
        places[within] = Permutation(total, (self.source.split.seed,))(rows[within])
        return places


class Divided(NamedTuple):
    """Typed rows of all parts, and those of the training part, to learn from.

    Frames lack the columns of `distinct_ids`, which stand beside them.
    """

    frame: pl.DataFrame
    distinct: Mapping[str, Distinct]
    parts: np.ndarray
    train: pl.DataFrame
    distinct_of_train: Mapping[str, Distinct]


def divided(chunk: Chunk, schema: Schema, assignment: Assignment) -> Divided:
    """The rows of a chunk by part."""
    parts, distinct = assignment.parts(chunk), distinct_ids(chunk.frame, schema)
    is_train, frame = parts == TRAIN, chunk.frame.drop(distinct)
    of_train = {name: Distinct(ids, codes[is_train]) for name, (ids, codes) in distinct.items()}
    return Divided(frame, distinct, parts, frame.filter(pl.Series(is_train)), of_train)


def _is_from(values: pl.Series, first: str) -> pl.Series:
    """Whether a value is `first` or a larger one: as a number if both are, else as text."""
    by_text = values >= first
    try:
        least = float(first)
    except ValueError:
        return by_text
    number = values.cast(pl.Float64, strict=False)
    return by_text.zip_with(number.is_null(), number >= least)


def _as_in_cells(values: Sequence[str]) -> list[str]:
    """Values as they are given, and as preparation writes them: 7 for 7.0."""
    return [*values, *written_alike(pl.Series(values, dtype=pl.String))[0]]
