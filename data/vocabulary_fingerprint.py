"""What tells vocabularies of the same sizes apart."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import polars as pl

from stampede.data.learning.learned import Saved
from stampede.data.learning.numbers import NumberRange
from stampede.data.prepared.manifest import read_manifest
from stampede.data.row_meanings import read_learned_of, row_meanings
from stampede.data.schema.columns import IdField, Vocabulary

# Ids that are one text at a time.
_PIECE = 1 << 20

_REMEDY = "delete the folder to prepare it again"

# What chooses the ids of a vocabulary shows in them.
_SHOWS_IN_THE_IDS = {"min_count", "max_size"}


def vocabulary_fingerprint(folder: Path, remedy: str = _REMEDY) -> str:
    """SHA-256 of what the inputs of prepared data mean, in hexadecimal.

    Of each field, in order: the id of every row, or the rule that gives an id its row; of each
    number its transforms, and its statistics to six digits, as sums of floats differ in their last
    bits between machines. It is a function of these only, not of names, places or bytes of files.
    One vocabulary is in memory at a time.

    Args:
        folder: a prepared folder, perhaps without rows.
        remedy: what to do where it is damaged.

    Raises:
        DataError: it is damaged.
    """
    meanings = row_meanings(folder, remedy).values()
    saved = read_learned_of(folder, remedy)
    described = {
        "fields": [
            [f.entry.model_dump(exclude_defaults=True), _rule(f.field), f.edges] for f in meanings
        ],
        "numbers": read_manifest(folder, remedy).numbers if saved is None else _numbers(saved),
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for found in meanings:
        if found.values is not None:
            _add_texts(digest, found.values())
    return digest.hexdigest()


def _rule(field: IdField | None) -> dict[str, Any] | None:
    if field is None:
        return None
    hidden = _SHOWS_IN_THE_IDS if isinstance(field, Vocabulary) else set()
    # Without defaults, so that an option that is added later does not change it; how ids become
    # rows may be a default.
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


def _add_texts(digest: Any, texts: pl.Series) -> None:
    for start in range(0, len(texts), _PIECE):
        piece = texts.slice(start, _PIECE)
        # With their lengths, so that "a", "bc" is not "ab", "c".
        digest.update(piece.str.len_bytes().to_numpy().astype("<u8").tobytes())
        digest.update(piece.str.join("").item().encode())
