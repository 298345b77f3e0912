"""Rows to be scored, piece by piece: of raw files, of prepared data, of a run's own data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stampede.data import DataError, Dataset, Part
from stampede.data.learning.learned import Learned
from stampede.data.parallel import computed_ahead
from stampede.data.prepared.manifest import PartName, read_manifest
from stampede.data.prepared.reader import Shard, ShardedPart, open_part
from stampede.data.raw.files import expand
from stampede.data.raw.log import LABEL, WEIGHT, Chunk, scoring_log
from stampede.data.raw.rows import BadRows
from stampede.data.samples import Slice

# Rows of prepared data in a piece.
_PIECE = 1 << 18


@dataclass(frozen=True)
class Piece:
    """Some rows.

    Attributes:
        part: their inputs.
        rows: `[n]` int64, number of each within its file, bad rows counted, or within its part;
            from 0.
        file: number of their file; of prepared data 0.
        position: how much has been read with them, in the units of `Rows.size`.
    """

    part: Part
    rows: np.ndarray
    file: int
    position: int


@dataclass(frozen=True)
class Rows:
    """Rows to be scored.

    Attributes:
        pieces: makes them, in order; once.
        size: of all of them: bytes of files, or rows.
        files: names, where they are of files.
        has_label, has_weight: whether these are there.
    """

    pieces: Callable[[], Iterator[Piece]]
    size: int
    files: tuple[str, ...]
    has_label: bool
    has_weight: bool


def rows_of_files(
    patterns: list[str],
    learned: Learned,
    numbers_dtype: str,
    bad_rows: BadRows,
    with_label: bool = True,
    bad_values_are_missing: bool = False,
) -> Rows:
    """Rows of raw files with the columns that a model was trained with.

    Args:
        patterns: files or globs of them.
        learned: what turns them into inputs.
        numbers_dtype: that numbers had in training.
        bad_rows: what happens to rows that cannot be read.
        with_label: whether label and weight are read where they are there.
        bad_values_are_missing: whether a bad value is taken for a missing one; else its row is bad.

    Raises:
        DataError: a file is absent or cannot be read.
    """
    log = scoring_log(learned.schema, expand(patterns), with_label, bad_values_are_missing)

    def encode(chunk: Chunk) -> Piece:
        part = _encoded(chunk, learned, numbers_dtype)
        return Piece(part, chunk.numbers, chunk.file, chunk.position)

    def pieces() -> Iterator[Piece]:
        chunks = (chunk for chunk in log.chunks(bad_rows) if len(chunk.numbers))
        return computed_ahead(encode, chunks, 2, threads=2)

    return Rows(
        pieces,
        log.bytes,
        tuple(map(str, log.files)),
        has_label=log.schema.label is not None,
        has_weight=log.schema.weight is not None,
    )


def _encoded(chunk: Chunk, learned: Learned, numbers_dtype: str) -> ShardedPart:
    frame, rows = chunk.frame, len(chunk.numbers)
    encoded = learned.encode(frame, numbers_dtype)
    arrays = {
        "ids": encoded.ids,
        "numbers": encoded.numbers,
        "label": frame[LABEL].to_numpy() if LABEL in frame.columns else np.zeros(rows, np.float32),
    }
    if WEIGHT in frame.columns:
        arrays["weight"] = frame[WEIGHT].to_numpy()
    for i, (lengths, values) in enumerate(encoded.bags):
        arrays[f"offsets_{i}"] = np.concatenate([[0], np.cumsum(lengths)])
        arrays[f"values_{i}"] = values
    # Polars' own memory must not be written, which torch warns of.
    tensors = {
        name: torch.from_numpy(array if array.flags.writeable else array.copy())
        for name, array in arrays.items()
    }
    return ShardedPart((Shard(rows, tensors),))


def rows_of_folder(folder: Path, part: PartName, with_label: bool = True) -> Rows:
    """Rows of a part of a prepared folder.

    Args:
        with_label: whether label and weight are told.

    Raises:
        DataError: it has none, or is damaged.
    """
    manifest = read_manifest(folder)
    if not manifest.rows(part):
        raise DataError(f"{folder}: the {part} part has no rows; write another --part")
    return _rows_of_part(open_part(folder, manifest, part), with_label, manifest.has_weight)


def rows_of_dataset(dataset: Dataset, part: PartName, with_label: bool = True) -> Rows:
    """Rows of a part of an opened data set.

    Args:
        with_label: whether label and weight are told.

    Raises:
        DataError: it has none.
    """
    found = getattr(dataset, part)
    if found is None:
        raise DataError(f"the run's data have no {part} part; write another --part")
    return _rows_of_part(found, with_label, dataset.has_weight)


def _rows_of_part(part: Part, with_label: bool, has_weight: bool) -> Rows:
    def pieces() -> Iterator[Piece]:
        for start in range(0, part.rows, _PIECE):
            stop = min(start + _PIECE, part.rows)
            yield Piece(Slice(part, start, stop), np.arange(start, stop), 0, stop)

    return Rows(pieces, part.rows, (), with_label, with_label and has_weight)
