"""What the rows of a table stand for: matches rows of two tables, and hashes all meanings.

Functions that read a folder raise a `DataError` with `remedy` if it is damaged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
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
from stampede.data.learning.learned import (
    LEARNED,
    IdsInPieces,
    NumberRange,
    Saved,
    read_ids,
    read_saved,
)
from stampede.data.learning.rows_of_ids import FIRST_ROW, RowsOfIds
from stampede.data.prepared.manifest import (
    LEARNED_FOLDER,
    REMEDY,
    FieldEntry,
    Manifest,
    read_manifest,
)
from stampede.data.schema.schema import Hashed, IdField, Quantiles, Vocabulary
from stampede.settings import reading

_FIRST_BUCKET = 1

# Ids that are hashed at a time.
_PIECE = 1 << 20

# Options whose effect shows in the ids of a vocabulary.
_SHOWS_IN_THE_IDS = {"min_count", "max_size"}


class OtherMeaningError(ValueError):
    """No row of one table means the same as a row of the other."""


@dataclass(frozen=True)
class RowMeanings:
    """What the rows of a field's table stand for."""

    entry: FieldEntry
    field: IdField | None = None  # how ids become rows; None if they are already rows
    edges: tuple[float, ...] = ()  # inner edges of a field cut at quantiles
    values: Callable[[], pl.Series] | None = None  # reads the ids of a vocabulary by row
    pieces: Iterable[pl.Series] = ()  # the same ids, `_PIECE` at a time

    @property
    def encode(self) -> str:
        """The encoding of the ids; `rows` if they are already rows."""
        return "rows" if self.field is None else self.field.encode

    @property
    def buckets(self) -> list[tuple[float, float]]:
        """Lower and upper edge of each bucket of a field cut at quantiles."""
        return list(pairwise((-inf, *self.edges, inf)))


def row_meanings(folder: Path, remedy: str) -> dict[str, RowMeanings]:
    """Meanings of the rows of all fields of a folder; vocabularies are read when needed."""
    manifest, saved = _read(folder, remedy)
    if saved is None:
        return {entry.name: RowMeanings(entry) for entry in manifest.fields}
    found = {}
    for entry in manifest.fields:
        name, values, pieces = entry.name, None, ()
        field, edges = saved.schema_.ids[name], tuple(saved.quantiles.get(name, ()))
        if isinstance(field, Vocabulary):
            values = partial(read_ids, folder / LEARNED_FOLDER, saved, name, remedy)
            pieces = IdsInPieces(folder / LEARNED_FOLDER / saved.vocabularies[name], _PIECE)
        found[name] = RowMeanings(entry, field, edges, values, pieces)
    return found


def _read(folder: Path, remedy: str) -> tuple[Manifest, Saved | None]:
    """The manifest, and what was learned; None for imported arrays, whose ids are already rows."""
    manifest, learned = read_manifest(folder, remedy), folder / LEARNED_FOLDER
    is_learned = manifest.learned or learned.is_dir()
    return manifest, read_saved(learned, remedy) if is_learned else None


def matched_rows(saved: RowMeanings, now: RowMeanings) -> np.ndarray:
    """For each row of `now`, the row of `saved` that means the same: `[rows of now]` int64, or -1.

    Ids of vocabularies match by text, so a vocabulary may have grown or changed its order. Ids that
    are rows or integers keep their row. Buckets of a quantile field match if both edges are equal;
    hashes match if both tables have the same buckets and seed. No row of `saved` appears twice.

    Raises:
        OtherMeaningError: the tables encode ids in different ways.
        DataError: a vocabulary is damaged.
    """
    if saved.encode != now.encode:
        raise OtherMeaningError(f"encode was {saved.encode}, now {now.encode}")
    found = np.full(now.entry.rows, -1, dtype=np.int64)
    if isinstance(now.field, Vocabulary):
        found[FIRST_ROW:] = RowsOfIds([saved.values()])(now.values())
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
    # Rows of missing and unseen values match by their kind, wherever they are; an id that `saved`
    # has not seen matches no row.
    found[np.isin(found, saved.entry.unknown_rows)] = -1
    found[list(now.entry.unknown_rows)] = -1
    for kind in ("missing_row", "unseen_row"):
        then, here = getattr(saved.entry, kind), getattr(now.entry, kind)
        if then is not None and here is not None:
            found[here] = then
    return found


def keys_of_rows(meanings: RowMeanings, rows: np.ndarray) -> np.ndarray:
    """A hash of the ids of some rows of a vocabulary's table, `[n]` uint64; see `stable_hashes`."""
    return stable_hashes(meanings.values().gather(rows - FIRST_ROW))


def vocabulary_fingerprint(folder: Path, remedy: str = REMEDY) -> str:
    """SHA-256 of what the inputs of prepared data mean, in hexadecimal; samples are not needed.

    It covers, for each field in order, the id of every row, or the rule that gives an id its row;
    for each number, its transforms and its statistics to six digits, as the last bits of sums
    differ between machines. File names and bytes do not matter.
    """
    meanings = row_meanings(folder, remedy).values()
    manifest, saved = _read(folder, remedy)
    fields = []
    for found in meanings:
        rule, field = None, found.field
        if field is not None:
            hidden = _SHOWS_IN_THE_IDS if isinstance(field, Vocabulary) else set()
            # Without defaults, so that options added later do not change it. `encode` may be one.
            rule = field.model_dump(mode="json", exclude=hidden, exclude_defaults=True)
            rule["encode"] = field.encode
        fields.append([found.entry.model_dump(exclude_defaults=True), rule, found.edges])
    described = {
        "fields": fields,
        "numbers": manifest.numbers if saved is None else _numbers(saved),
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for found in meanings:
        if found.entry.table is not None:
            continue
        with reading(folder / LEARNED_FOLDER / LEARNED, DataError, remedy):
            for piece in found.pieces:
                # With the lengths, so that "a", "bc" differs from "ab", "c".
                digest.update(piece.str.len_bytes().to_numpy().astype("<u8").tobytes())
                digest.update(piece.str.join("").item().encode())
    return digest.hexdigest()


def _numbers(saved: Saved) -> list[Any]:
    found = []
    for name, field in saved.schema_.numbers.items():
        seen = saved.ranges.get(name, NumberRange())
        statistics = (seen.low, seen.high, seen.mean, seen.deviation)
        shown = [f"{value:.6g}" for value in statistics]
        told = field.model_dump(mode="json", exclude_defaults=True, exclude={"bins"})
        if field.transform == ["minmax"]:
            # Left out, as it was the default when the fingerprint was introduced.
            del told["transform"]
        found.append([name, told, shown])
    return found
