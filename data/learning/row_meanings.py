"""The meaning of a table's rows: which rows of two tables mean the same, a hash of all meanings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stampede.data.errors import DataError
from stampede.data.formulas import stable_hashes
from stampede.data.learning.learned import LEARNED, NumberRange, Saved, read_ids, read_saved
from stampede.data.learning.vocabulary import FIRST_ROW, UNSEEN_ROW, RowsOfIds
from stampede.data.prepared.manifest import (
    LEARNED_FOLDER,
    REMEDY,
    FieldEntry,
    read_manifest,
)
from stampede.data.schema.schema import Hashed, IdField, Quantiles, Vocabulary

_FIRST_BUCKET = 1

# Ids that are joined to one text at a time.
_PIECE = 1 << 20

# The ids of a vocabulary show what these options do.
_SHOWS_IN_THE_IDS = {"min_count", "max_size"}


class OtherMeaningError(ValueError):
    """No row of one table means what a row of the other does."""


@dataclass(frozen=True)
class RowMeanings:
    """The meaning of the rows of a field's table.

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
        """Name of how ids become rows; `rows` where they are rows already."""
        return "rows" if self.field is None else self.field.encode

    @property
    def buckets(self) -> list[tuple[float, float]]:
        """Both edges of each bucket, of a field cut at quantiles."""
        return list(pairwise((-inf, *self.edges, inf)))


def row_meanings(folder: Path, remedy: str) -> dict[str, RowMeanings]:
    """Of all fields of a prepared folder, by name; vocabularies are read when they are needed.

    Args:
        remedy: what to do where the folder is damaged.

    Raises:
        DataError: it is.
    """
    saved = _learned_of(folder, remedy)
    fields = read_manifest(folder, remedy).fields
    return {entry.name: _meanings(folder, entry, saved, remedy) for entry in fields}


def _learned_of(folder: Path, remedy: str) -> Saved | None:
    """What was learned for prepared data; None where nothing was, as of imported arrays."""
    learned = folder / LEARNED_FOLDER
    if not read_manifest(folder, remedy).learned and not learned.is_dir():
        return None
    return read_saved(learned, remedy)


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
    values = read_ids(folder / LEARNED_FOLDER, saved, entry.name, rows, remedy)
    if not values.is_unique().all():
        what = f"the vocabulary of {entry.name!r} does not hold {rows:,} different ids"
        raise _damaged(folder / LEARNED_FOLDER, what, remedy)
    return values


def _damaged(path: Path, what: str, remedy: str) -> DataError:
    return DataError(f"{path}: damaged ({what}); {remedy}")


def matched_rows(saved: RowMeanings, now: RowMeanings) -> np.ndarray:
    """The row of `saved` that means the same as each row of `now`.

    Ids of a vocabulary are compared as texts, so that it may have grown or been re-ordered. An id
    that is a row, or a whole number, stays that row. A bucket of a quantile field is matched where
    the other has one with the same two edges; hashes where both have as many buckets and one seed.
    Of one vocabulary the texts are in memory, of the other a hash of each.

    Returns:
        `[rows of now]` int64, -1 where there is none; no row of `saved` is there twice.

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
            then, here = saved.field, now.field
            if (then.buckets, then.seed) != (here.buckets, here.seed):
                raise OtherMeaningError(
                    f"hashed into {then.buckets:,} buckets with seed {then.seed}, now "
                    f"{here.buckets:,} with seed {here.seed}"
                )
        common = min(saved.entry.rows, now.entry.rows)
        found[:common] = np.arange(common)
    # Rows of missing and of unseen values match each other, wherever they are.
    found[np.isin(found, saved.entry.unknown_rows)] = -1
    found[list(now.entry.unknown_rows)] = -1
    for kind in ("missing_row", "unseen_row"):
        then, here = getattr(saved.entry, kind), getattr(now.entry, kind)
        if then is not None and here is not None:
            found[here] = then
    return found


def keys_of_rows(meanings: RowMeanings, rows: np.ndarray) -> np.ndarray:
    """A hash of the ids of some rows of a vocabulary's table, `[n]` uint64; see `stable_hashes`.

    Args:
        rows: `[n]`, none of missing or unseen ids.

    Raises:
        DataError: the vocabulary is damaged.
    """
    return stable_hashes(meanings.values().gather(rows - FIRST_ROW))


def vocabulary_fingerprint(folder: Path, remedy: str = REMEDY) -> str:
    """SHA-256 of the meaning of the inputs of prepared data, in hexadecimal.

    Of each field, in order: the id of every row, or the rule that gives an id its row; of each
    number its transforms, and its statistics to six digits, as sums of floats differ in their last
    bits between machines. Names, places and bytes of files do not matter. One vocabulary is in
    memory at a time.

    Args:
        folder: a prepared folder, perhaps without rows.
        remedy: what to do where it is damaged.

    Raises:
        DataError: it is damaged.
    """
    meanings = row_meanings(folder, remedy).values()
    saved = _learned_of(folder, remedy)
    described = {
        "fields": [
            [f.entry.model_dump(exclude_defaults=True), _rule(f.field), f.edges] for f in meanings
        ],
        "numbers": read_manifest(folder, remedy).numbers if saved is None else _numbers(saved),
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for found in meanings:
        if found.values is None:
            continue
        texts = found.values()
        for start in range(0, len(texts), _PIECE):
            piece = texts.slice(start, _PIECE)
            # With their lengths, so that "a", "bc" is not "ab", "c".
            digest.update(piece.str.len_bytes().to_numpy().astype("<u8").tobytes())
            digest.update(piece.str.join("").item().encode())
    return digest.hexdigest()


def _rule(field: IdField | None) -> dict[str, Any] | None:
    if field is None:
        return None
    hidden = _SHOWS_IN_THE_IDS if isinstance(field, Vocabulary) else set()
    # Without defaults, so that an option that is added later does not change it; `encode` may be a
    # default.
    told = field.model_dump(mode="json", exclude=hidden, exclude_defaults=True)
    return {**told, "encode": field.encode}


def _numbers(saved: Saved) -> list[Any]:
    found = []
    for name, field in saved.schema_.numbers.items():
        seen = saved.ranges.get(name, NumberRange())
        statistics = (seen.low, seen.high, seen.mean, seen.deviation)
        shown = [f"{value:.6g}" for value in statistics]
        told = field.model_dump(mode="json", exclude_defaults=True, exclude={"bins"})
        if field.transform == ["minmax"]:
            # It was the default once, and left out.
            del told["transform"]
        found.append([name, told, shown])
    return found
