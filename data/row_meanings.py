"""What the rows of a field's table stand for, and which rows of two tables stand for the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import polars as pl

from stampede.data.errors import DataError
from stampede.data.learning.learned import LEARNED, Saved, read_saved, read_vocabulary
from stampede.data.learning.vocabulary import FIRST_ROW, UNSEEN_ROW, RowsOfIds
from stampede.data.prepared.manifest import MANIFEST, FieldEntry, read_manifest
from stampede.data.schema.columns import Hashed, IdField, Quantiles, Vocabulary
from stampede.data.writing import LEARNED_FOLDER

# Of fields whose ids are rows of their tables already.
_ROWS = "rows"

_FIRST_BUCKET = 1


class OtherMeaningError(ValueError):
    """No row of one table stands for what a row of the other does."""


@dataclass(frozen=True)
class RowMeanings:
    """What the rows of a field's table stand for.

    Attributes:
        entry: the table.
        field: how ids become rows; None where they are rows already.
        edges: inner edges of a field cut at quantiles.
        values: reads the ids of a vocabulary, String, in the order of their rows.
    """

    entry: FieldEntry
    field: IdField | None = None
    edges: tuple[float, ...] = ()
    values: Callable[[], pl.Series] | None = None

    @property
    def encode(self) -> str:
        """Name of how ids become rows."""
        return _ROWS if self.field is None else self.field.encode

    @property
    def buckets(self) -> list[tuple[float, float]]:
        """Both edges of each bucket, of a field cut at quantiles."""
        return list(pairwise((-inf, *self.edges, inf)))


def read_learned_of(folder: Path, remedy: str) -> Saved | None:
    """What was learned for prepared data; None where nothing was, as of imported arrays.

    Raises:
        DataError: the folder is damaged.
    """
    learned = folder / LEARNED_FOLDER
    if not read_manifest(folder, remedy).learned and not learned.is_dir():
        return None
    return read_saved(learned, remedy)


def row_meanings(folder: Path, remedy: str) -> dict[str, RowMeanings]:
    """Of all fields of a prepared folder, by name; vocabularies are read when they are needed.

    Args:
        remedy: what to do where the folder is damaged.

    Raises:
        DataError: it is.
    """
    saved = read_learned_of(folder, remedy)
    found = {}
    for entry in read_manifest(folder, remedy).fields:
        if any(row >= entry.rows for row in entry.unknown_rows):
            raise _damaged(folder / MANIFEST, f"{entry.name!r} has fewer rows", remedy)
        found[entry.name] = _meanings(folder, entry, saved, remedy)
    return found


def _meanings(folder: Path, entry: FieldEntry, saved: Saved | None, remedy: str) -> RowMeanings:
    if saved is None:
        return RowMeanings(entry)
    field = saved.schema_.ids.get(entry.name)
    edges = tuple(saved.quantiles.get(entry.name, ()))
    if field is None or (isinstance(field, Quantiles) and len(edges) + 2 != entry.rows):
        learned = folder / LEARNED_FOLDER / LEARNED
        raise _damaged(learned, f"it does not fit the field {entry.name!r}", remedy)
    values = None
    if isinstance(field, Vocabulary):
        values = partial(_values, folder, entry, saved, remedy)
    return RowMeanings(entry, field, edges, values)


def _values(folder: Path, entry: FieldEntry, saved: Saved, remedy: str) -> pl.Series:
    rows = entry.rows - FIRST_ROW
    values = read_vocabulary(folder / LEARNED_FOLDER, saved, entry.name, rows, remedy)
    if not values.is_unique().all():
        raise _damaged(
            folder / LEARNED_FOLDER,
            f"the vocabulary of {entry.name!r} does not hold {rows:,} different ids",
            remedy,
        )
    return values


def _damaged(path: Path, what: str, remedy: str) -> DataError:
    return DataError(f"{path}: damaged ({what}); {remedy}")


def matched_rows(saved: RowMeanings, now: RowMeanings) -> np.ndarray:
    """The row of `saved` that stands for the same as each row of `now`.

    Ids of a vocabulary are compared as texts, so that it may have grown or been re-ordered. An id
    that is a row, or a whole number, stays that row. A bucket of a quantile field is matched where
    the other has one with the same two edges; hashes where both have as many buckets and one seed.
    Of one vocabulary the texts are in memory, of the other a hash of each.

    Returns:
        `[rows of now]` int64, -1 where there is none. No row of `saved` stands there twice.

    Raises:
        OtherMeaningError: the rows are made in different ways.
        DataError: a vocabulary is damaged.
    """
    if saved.encode != now.encode:
        raise OtherMeaningError(f"encode was {saved.encode}, now {now.encode}")
    found = np.full(now.entry.rows, -1, dtype=np.int64)
    if isinstance(now.field, Vocabulary):
        rows = RowsOfIds(saved.values())(now.values())
        rows[rows == UNSEEN_ROW] = -1
        found[FIRST_ROW:] = rows
    elif isinstance(now.field, Quantiles):
        row_of = {bucket: row for row, bucket in enumerate(saved.buckets, _FIRST_BUCKET)}
        found[_FIRST_BUCKET:] = [row_of.get(bucket, -1) for bucket in now.buckets]
    else:
        if isinstance(now.field, Hashed):
            _check_same_hash(saved.field, now.field)
        common = min(saved.entry.rows, now.entry.rows)
        found[:common] = np.arange(common)
    return _with_special_rows(found, saved.entry, now.entry)


def _check_same_hash(saved: Hashed, now: Hashed) -> None:
    if (saved.buckets, saved.seed) != (now.buckets, now.seed):
        raise OtherMeaningError(
            f"hashed into {saved.buckets:,} buckets with seed {saved.seed}, now {now.buckets:,} "
            f"with seed {now.seed}"
        )


def _with_special_rows(found: np.ndarray, saved: FieldEntry, now: FieldEntry) -> np.ndarray:
    """Rows of missing and unseen values belong to each other, wherever they are."""
    found[np.isin(found, saved.unknown_rows)] = -1
    found[list(now.unknown_rows)] = -1
    for then, here in ((saved.missing_row, now.missing_row), (saved.unseen_row, now.unseen_row)):
        if then is not None and here is not None:
            found[here] = then
    return found
