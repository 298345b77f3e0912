"""Writes encoded rows as a prepared folder."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from tqdm.auto import tqdm

from stampede.data.learning import Learned
from stampede.data.overlap import computed_ahead
from stampede.data.prepared.manifest import MANIFEST, PARTS, Manifest, PartName, ShardEntry
from stampede.data.prepared.shard_writer import SHARD_ROWS, PartWriter
from stampede.data.progress import RowProgress
from stampede.data.raw import BadRows, RawLog
from stampede.data.raw.bad_rows import OnBadRow
from stampede.data.raw.missing_marks import by_column, sentence
from stampede.data.raw.typed import LABEL, TIME, WEIGHT
from stampede.data.spool import Spooled
from stampede.files import file_entry
from stampede.settings import Section

LEARNED_FOLDER = "learned"
BAD_ROWS = "bad_rows.jsonl"

_Arrays = dict[str, np.ndarray]
_Bags = list[tuple[np.ndarray, np.ndarray]]


class WritingOptions(Section):
    """How prepared data are written.

    Attributes:
        written: what a user writes before a key to set it.
    """

    written: ClassVar[str] = "--set "

    on_bad_row: OnBadRow = Field(
        "error", description="a row that cannot be read: error, or skip: left out and written aside"
    )
    numbers_dtype: Literal["float32", "float16"] = Field(
        "float32", description="type of the numbers on disk"
    )
    shard_rows: int = Field(SHARD_ROWS, ge=1, description="rows in a file of the prepared form")


def write_rows(
    folder: Path,
    rows: Iterable[Spooled],
    learned: Learned,
    options: WritingOptions,
    progress: RowProgress,
) -> dict[PartName, list[ShardEntry]]:
    """Encode rows and write them, each to its part; what the manifest says about the files."""
    writers = {part: PartWriter(folder, part, options.shard_rows) for part in PARTS}

    def encode(some: Spooled) -> tuple[Spooled, _Arrays, _Bags]:
        return some, *_arrays(some, learned, options.numbers_dtype)

    for some, arrays, bags in computed_ahead(encode, rows, 2, threads=2):
        for number, part in enumerate(PARTS):
            mask = some.parts == number
            if mask.any():
                writers[part].append(*_masked(arrays, bags, mask))
        progress.advance_to(some.position, len(some.parts))
    # The disk then works for all of them while their checksums are made.
    for writer in writers.values():
        writer.close()
    return {part: writer.finish() for part, writer in writers.items()}


def write_manifest(
    folder: Path,
    log: RawLog,
    learned: Learned,
    options: WritingOptions,
    parts: dict[PartName, list[ShardEntry]],
    bad_rows: BadRows,
    source: dict[str, Any],
) -> None:
    """Write what the folder consists of; the last file of a preparation.

    Args:
        source: what the rows were made of, besides files and options.
    """
    marks = by_column(bad_rows.marks)
    manifest = Manifest(
        version=metadata.version("stampede"),
        fields=learned.fields,
        numbers=list(log.schema.numbers),
        ids_dtype=learned.ids_dtype,
        numbers_dtype=options.numbers_dtype,
        has_weight=log.schema.weight is not None,
        has_time=log.schema.time is not None,
        parts=parts,
        learned=[file_entry(path, folder) for path in sorted((folder / LEARNED_FOLDER).iterdir())],
        bad_rows=bad_rows.count,
        source={
            "files": [str(file) for file in log.files],
            "options": options.model_dump(mode="json"),
            **({"missing_marks": marks} if marks else {}),
            **source,
        },
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    if bad_rows.count:
        tqdm.write(f"{bad_rows.count:,} bad rows were left out; see {BAD_ROWS}")
    if marks:
        tqdm.write(sentence(marks))


def _arrays(some: Spooled, learned: Learned, numbers_dtype: str) -> tuple[_Arrays, _Bags]:
    """Arrays of the manifest's names, and lengths and values of the multi-valued fields."""
    frame = some.frame
    encoded = learned.encode(frame, numbers_dtype, some.distinct)
    arrays = {
        "ids": encoded.ids,
        "numbers": encoded.numbers,
        "label": frame[LABEL].to_numpy().astype(np.uint8),
    }
    if WEIGHT in frame.columns:
        arrays["weight"] = frame[WEIGHT].to_numpy()
    if TIME in frame.columns:
        arrays["time"] = frame[TIME].to_numpy()
    return arrays, encoded.bags


def _masked(arrays: _Arrays, bags: _Bags, mask: np.ndarray) -> tuple[_Arrays, _Bags]:
    if mask.all():
        return arrays, bags
    return (
        {name: array[mask] for name, array in arrays.items()},
        [(lengths[mask], values[np.repeat(mask, lengths)]) for lengths, values in bags],
    )
