"""Rows of a raw log or a prepared folder, copied to Parquet files for Polars to describe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow

from stampede.data.errors import DataError
from stampede.data.learning.vocabulary import FIRST_ROW, VALUE, read_vocabulary
from stampede.data.prepared.manifest import (
    LEARNED_FOLDER,
    PARTS,
    REMEDY,
    FieldEntry,
    Manifest,
    missing_marks_sentence,
    read_manifest,
)
from stampede.data.prepared.verify import map_shard
from stampede.data.prepared.writer import RowsOfParts
from stampede.data.progress import RowProgress
from stampede.data.raw.log import LABEL, TIME, Chunk, RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Hashed, IdField, Integers, Quantiles, TimePart
from stampede.data.sources import Assignment, Source
from stampede.settings import counted, reading

PART, PLACE = "#part", "#place"

_PIECE_ROWS = 1 << 18


@dataclass(frozen=True)
class Rows:
    """Rows to describe.

    Attributes:
        frame: one column per id field and number, null where missing, lists of ids for multi-valued
            fields; `#label`, `#part` (index into `PARTS`), `#place` (see `by_time`).
        by_time: whether `#place` is seconds since 1970; else it is the row's number.
        ids: kind of each id field, in a word, by name.
        numbers: names of the numeric columns.
        notes: sentences for the reader of the description.
        filled: whether missing numbers were filled, so that they cannot be counted.
        unseen: by id field, the id that all ids absent from the training part share.
        texts: maps a field and some of its ids to their text.
    """

    frame: pl.LazyFrame
    by_time: bool
    ids: Mapping[str, str]
    numbers: Sequence[str]
    notes: Sequence[str]
    filled: bool = False
    unseen: Mapping[str, int] = field(default_factory=dict)
    texts: Callable[[str, list[Any]], list[str]] = lambda _, ids: list(map(str, ids))


def raw_rows(source: Source, bad_rows: BadRows, limit: int | None, folder: Path) -> Rows:
    """Rows of a raw log, kept as Parquet files in a folder.

    Args:
        limit: read only this many rows, bad ones included; None: all.

    Raises:
        DataError: the log has no good row, or has a bad row and `bad_rows` refuses it.
    """
    log, fields = source.log, source.log.schema.ids
    counts = None
    if source.split.needs_counts() and limit is None:
        counts = log.counts()
    elif source.split.needs_counts():
        counts = [0] * len(log.files)
        for _ in _first_rows(log, BadRows("skip"), limit, counts):
            pass
    assignment = Assignment(source, counts)
    first_rows = _first_rows(log, bad_rows, limit, [0] * len(log.files))
    pieces = (RowsOfParts(c.frame, assignment.parts(c), c.position) for c in first_rows)
    by_time = log.schema.time is not None
    frame = _spooled(pieces, by_time, log.bytes, folder)
    if frame is None:
        log.check_rows()
        raise DataError(
            f"{log.files[0]}: has no good row, but {counted(bad_rows.count, 'bad row')}"
        )
    notes = [
        f"parts: split {source.split.split}, see --set",
        "" if limit is None else f"only the first {limit:,} rows were read (--rows)",
        f"left out {counted(bad_rows.count, 'bad row')}, listed in a file" * bool(bad_rows.count),
        missing_marks_sentence(bad_rows.marks_by_column()),
    ]
    # A column cut into quantiles is described as a number.
    cut = [name for name, found in fields.items() if isinstance(found, Quantiles)]
    return Rows(
        frame,
        by_time,
        {name: _kind(found) for name, found in fields.items() if name not in cut},
        [*log.schema.numbers, *cut],
        [note for note in notes if note],
    )


def _first_rows(
    log: RawLog, bad_rows: BadRows, limit: int | None, counts: list[int]
) -> Iterator[Chunk]:
    """The first `limit` rows; `counts` is updated to the rows of each file read so far."""
    for chunk in log.chunks(bad_rows):
        if not len(chunk.numbers):
            continue
        counts[chunk.file] = int(chunk.numbers[-1]) + 1
        over = 0 if limit is None else max(sum(counts) - limit, 0)
        counts[chunk.file] -= over
        yield chunk.take(chunk.numbers < counts[chunk.file])
        if sum(counts) == limit:
            return


def prepared_rows(folder: Path, limit: int | None, spool: Path) -> Rows:
    """Rows of a prepared folder, kept as Parquet files in the folder `spool`.

    Args:
        limit: read only this many rows of each part; None: all.

    Raises:
        DataError: the folder is damaged.
    """
    manifest = read_manifest(folder)
    total = sum(manifest.rows(part) for part in PARTS)
    frame = _spooled(_pieces(folder, manifest, limit), manifest.has_time, total, spool)
    if frame is None:
        raise DataError(f"{folder}: has no rows; prepare the data again")
    notes = [
        "unseen: ids in the row that rare and unseen ids share; in a field without such a row, "
        "ids that no training sample has",
        "numbers are as prepared: missing ones are filled",
    ]
    if limit is not None:
        notes.append(f"only the first {limit:,} rows of each part were read (--rows)")
    if manifest.bad_rows:
        notes.append(
            f"{counted(manifest.bad_rows, 'bad row')} left out when the folder was prepared"
        )
    return Rows(
        frame,
        manifest.has_time,
        {entry.name: "many ids" if entry.multi else "ids" for entry in manifest.fields},
        manifest.numbers,
        notes,
        filled=True,
        unseen={e.name: e.unseen_row for e in manifest.fields if e.unseen_row is not None},
        texts=lambda name, ids: _texts(folder, manifest, name, ids),
    )


def _spooled(
    pieces: Iterable[RowsOfParts], by_time: bool, total: int, folder: Path
) -> pl.LazyFrame | None:
    """Rows written to a folder, one Parquet file per piece; None without rows.

    Args:
        total: the position of the last piece.
    """
    rows = 0
    with RowProgress("describing", total) as progress:
        for piece in pieces:
            place = pl.col(TIME) if by_time else pl.int_range(pl.len()) + rows
            parts = pl.Series(PART, piece.parts)
            frame = piece.frame.with_columns(parts, place.cast(pl.Int64).alias(PLACE))
            frame.write_parquet(folder / f"{rows:015d}.parquet", compression="lz4")
            rows += len(frame)
            progress.advance_to(piece.position, len(frame))
    return pl.scan_parquet(sorted(folder.glob("*.parquet"))) if rows else None


def _pieces(folder: Path, manifest: Manifest, limit: int | None) -> Iterator[RowsOfParts]:
    """The rows of a prepared folder; positions count rows."""
    position = 0
    for part, name in enumerate(PARTS):
        left = manifest.rows(name) if limit is None else limit
        for shard in manifest.parts.get(name, []):
            maps = map_shard(folder, shard, manifest.arrays())
            rows, left = min(shard.rows, left), left - min(shard.rows, left)
            for start in range(0, rows, _PIECE_ROWS):
                frame = _frame(manifest, maps, slice(start, min(start + _PIECE_ROWS, rows)))
                position += len(frame)
                yield RowsOfParts(frame, np.full(len(frame), part, np.int8), position)


def _frame(manifest: Manifest, maps: Mapping[str, np.ndarray], rows: slice) -> pl.DataFrame:
    arrays = {
        name: np.array(array[rows])
        for name, array in maps.items()
        if not name.startswith(("values_", "offsets_"))
    }
    columns = {LABEL: pl.Series(arrays["label"])}
    for j, entry in enumerate(manifest.single()):
        columns[entry.name] = _null_where_missing(pl.Series(arrays["ids"][:, j].copy()), entry)
    for i, entry in enumerate(manifest.multi()):
        offsets = np.array(maps[f"offsets_{i}"][rows.start : rows.stop + 1])
        values = pl.Series(np.array(maps[f"values_{i}"][offsets[0] : offsets[-1]]))
        lists = _null_where_missing(values, entry).to_arrow()
        columns[entry.name] = pl.from_arrow(
            pyarrow.LargeListArray.from_arrays(offsets - offsets[0], lists)
        )
    for j, name in enumerate(manifest.numbers):
        columns[name] = pl.Series(arrays["numbers"][:, j].astype(np.float64))
    if manifest.has_time:
        columns[TIME] = pl.Series(arrays["time"])
    return pl.DataFrame(columns)


def _null_where_missing(values: pl.Series, entry: FieldEntry) -> pl.Series:
    if entry.missing_row is None:
        return values
    return values.set(values == entry.missing_row, None)


def _texts(folder: Path, manifest: Manifest, column: str, rows: list[int]) -> list[str]:
    """Texts of ids if the folder has its vocabulary, else `row N`."""
    name = f"{LEARNED_FOLDER}/{column}.parquet"
    if all(file.name != name for file in manifest.learned):
        return [f"row {row}" for row in rows]
    with reading(folder / name, DataError, REMEDY):
        ids = read_vocabulary(folder / name)[VALUE]
        return ids.gather([row - FIRST_ROW for row in rows]).to_list()


def _kind(found: IdField) -> str:
    """The field's kind as the table shows it."""
    if isinstance(found, TimePart):
        return found.encode.replace("_", " ")
    if isinstance(found, Hashed):
        return f"hash {found.buckets:,}"
    word = "integers" if isinstance(found, Integers) else "ids"
    return word if found.separator is None else f"many {word}"
