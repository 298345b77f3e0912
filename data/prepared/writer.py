"""Writes encoded rows as a prepared folder: shards of `.npy` files, and the manifest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import polars as pl
from tqdm.auto import tqdm

from stampede.data.errors import DataError
from stampede.data.learning.learned import EncodedBag, Learned
from stampede.data.learning.learner import Growth
from stampede.data.learning.unknown_shares import Shares, UnknownIds
from stampede.data.learning.value_counts import Distinct
from stampede.data.missing import missing_marks_sentence
from stampede.data.options import WritingOptions
from stampede.data.parallel import computed_ahead
from stampede.data.prepared.manifest import (
    BAD_ROWS,
    LEARNED_FOLDER,
    MANIFEST,
    PARTS,
    Manifest,
    PartName,
    ShardEntry,
    rounded_numbers_sentence,
    whole_ids_sentence,
)
from stampede.data.prepared.verify import record_verified
from stampede.data.progress import RowProgress
from stampede.data.raw.log import RawLog, labels_of
from stampede.data.raw.rows import BadRows
from stampede.data.raw.typed import TIME, WEIGHT
from stampede.files import FileEntry, file_entry
from stampede.settings import counted

_Arrays = dict[str, np.ndarray]
_Bags = list[EncodedBag]


Written = tuple[dict[PartName, list[ShardEntry]], dict[PartName, UnknownIds]]


class RowsOfParts(NamedTuple):
    """Some typed rows, and the part of each."""

    frame: pl.DataFrame  # see `stampede.data.raw.log`
    parts: np.ndarray  # `[n]` int8, place in `PARTS`
    position: int  # bytes of the log read up to them
    distinct: Mapping[str, Distinct] | None = None  # the columns that `frame` lacks


def write_rows(
    folder: Path,
    rows: Iterable[RowsOfParts],
    learned: Learned,
    options: WritingOptions,
    progress: RowProgress,
    new: Mapping[str, np.ndarray] | None = None,
    before: Sequence[int] = (0,) * len(PARTS),
) -> Written:
    """Encode rows and write each to its part.

    Args:
        new: see `UnknownIds`.
        before: rows of each part that are written elsewhere, before these.

    Returns:
        The manifest's entries of the files; and the counts of missing and unseen ids, by part.
    """
    unknown = {part: UnknownIds(learned.fields, new) for part in PARTS}
    writers = {
        part: PartWriter(folder, part, options.shard_rows, rows)
        for part, rows in zip(PARTS, before, strict=True)
    }

    def encode(some: RowsOfParts) -> tuple[RowsOfParts, _Arrays, _Bags]:
        arrays, bags = learned.encode(some.frame, options.numbers_dtype, some.distinct)
        labels = labels_of(some.frame, learned.schema.goals)
        arrays["label"] = _stored_labels(labels, learned.soft_labels or labels.ndim == 2)
        for name, column in (("weight", WEIGHT), ("time", TIME)):
            if column in some.frame.columns:
                arrays[name] = some.frame[column].to_numpy()
        return some, arrays, bags

    for some, arrays, bags in computed_ahead(encode, rows, 2, threads=2):
        for number, part in enumerate(PARTS):
            mask = some.parts == number
            if not mask.any():
                continue
            of_part = arrays, bags
            if not mask.all():
                of_part = (
                    {name: array[mask] for name, array in arrays.items()},
                    [bag.take(mask) for bag in bags],
                )
            writers[part].append(*of_part)
            unknown[part].add(of_part[0]["ids"], [bag.values for bag in of_part[1]])
        progress.advance_to(some.position, len(some.parts))
    # The disk then writes for all of them while their checksums are computed.
    for writer in writers.values():
        writer.close()
    return {part: writer.finish() for part, writer in writers.items()}, unknown


def shares_of(
    unknown: Mapping[PartName, UnknownIds], parts: Mapping[PartName, Sequence[ShardEntry]]
) -> dict[PartName, Shares]:
    """The shares of missing and unseen ids of each part that has rows."""
    return {part: counts.shares() for part, counts in unknown.items() if parts[part]}


def _stored_labels(labels: np.ndarray, are_floats: bool) -> np.ndarray:
    """Labels as they are stored, see `ShardEntry`."""
    if are_floats:
        return labels
    stored = labels.astype(np.uint8)
    if (stored != labels).any():
        raise DataError(
            f"found the label {labels[stored != labels][0]:g}, but the training's labels are 0 and "
            "1; write 0 or 1, or prepare both together"
        )
    return stored


def write_manifest(
    folder: Path,
    log: RawLog,
    learned: Learned,
    options: WritingOptions,
    parts: dict[PartName, list[ShardEntry]],
    bad_rows: BadRows,
    source: dict[str, Any],
    growth: Growth | None = None,
    place: Path | None = None,
) -> None:
    """Write the manifest, after all other files.

    `source` is what the rows were made of, besides files and options; `place` the complete folder's
    path, for the message.
    """
    marks = bad_rows.marks_by_column()
    told = (whole_ids_sentence, bad_rows.whole), (rounded_numbers_sentence, bad_rows.rounded)
    notes = [sentence(cells) for sentence, cells in told if cells] + source.get("notes", [])
    manifest = Manifest(
        version=metadata.version("stampede"),
        fields=learned.fields,
        numbers=list(log.schema.numbers),
        goals=learned.schema.goals,
        ids_dtype=learned.ids_dtype,
        numbers_dtype=options.numbers_dtype,
        has_weight=log.schema.weight is not None,
        has_time=log.schema.time is not None,
        parts=parts,
        learned=[file_entry(path, folder) for path in sorted((folder / LEARNED_FOLDER).iterdir())],
        bad_rows=bad_rows.count,
        period=0 if growth is None else growth.period,
        rows_before=0 if growth is None else growth.rows_before,
        source={
            "files": [str(file) for file in log.files],
            "bytes": log.bytes,
            "options": options.model_dump(mode="json"),
            **({"missing_marks": marks} if marks else {}),
            **source,
            "notes": notes,
        },
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    record_verified(folder)
    if bad_rows.count:
        listed = (place or folder) / BAD_ROWS
        rows = bad_rows.count + sum(one.rows for shards in parts.values() for one in shards)
        share = bad_rows.count / rows
        much = f"; they are {share:.0%} of all: is the schema right?" * (share >= 0.05)
        tqdm.write(f"left out {counted(bad_rows.count, 'bad row')}, listed in {listed}{much}")
    if marks:
        tqdm.write(missing_marks_sentence(marks))
    for note in notes:
        tqdm.write(note)


class PartWriter:
    """Writes a part shard by shard; file names begin with `part`.

    Args:
        before: rows of the part before these; the first shard lacks those that would be in it.
    """

    def __init__(self, folder: Path, part: str, shard_rows: int, before: int = 0) -> None:
        self._folder = folder
        self._part = part
        self._shard_rows = shard_rows
        self._files: dict[str, _NpyFile] = {}
        # The number of the shard, the place in it, and where its rows here begin.
        self._shard, self._rows = divmod(before, shard_rows)
        self._begin = self._rows
        self._closed: list[tuple[int, dict[str, Future[FileEntry]]]] = []
        # Files are flushed and checksums computed while the next rows are prepared.
        self._threads = ThreadPoolExecutor(2)

    def append(self, arrays: Mapping[str, np.ndarray], bags: _Bags) -> None:
        """Write some rows: arrays `[n, ...]`, and the ids of each multi-valued field."""
        rows = len(next(iter(arrays.values())))
        starts = [np.concatenate([[0], np.cumsum(bag.lengths)]) for bag in bags]
        done = 0
        while done < rows:
            stop = min(rows, done + self._shard_rows - self._rows)
            for name, array in arrays.items():
                self._file(name, array).append(array[done:stop])
            for i, bag in enumerate(bags):
                ends = starts[i][done : stop + 1]
                offsets = self._file(f"offsets_{i}", ends)
                of_ids = {
                    kind: (self._file(f"{kind}_{i}", each), each)
                    for kind, each in bag.arrays().items()
                }
                if not offsets.rows:
                    offsets.append(np.zeros(1, dtype=np.int64))
                offsets.append(ends[1:] - ends[0] + of_ids["values"][0].rows)
                for file, each in of_ids.values():
                    file.append(each[ends[0] : ends[-1]])
            self._rows += stop - done
            done = stop
            if self._rows == self._shard_rows:
                self.close()

    def close(self) -> None:
        """Begin to close the last shard; does not wait for it."""
        if self._rows == self._begin:
            return
        entries = {
            name: self._threads.submit(lambda file: file_entry(file.close(), self._folder), file)
            for name, file in self._files.items()
        }
        self._closed.append((self._rows - self._begin, entries))
        self._files, self._rows, self._begin, self._shard = {}, 0, 0, self._shard + 1

    def finish(self) -> list[ShardEntry]:
        """Close the last shard; returns the manifest's entries of all shards."""
        self.close()
        shards = [
            ShardEntry(rows=rows, files={name: entry.result() for name, entry in entries.items()})
            for rows, entries in self._closed
        ]
        self._threads.shutdown()
        return shards

    def _file(self, name: str, array: np.ndarray) -> _NpyFile:
        if name not in self._files:
            path = self._folder / f"{self._part}-{self._shard:05d}-{name}.npy"
            self._files[name] = _NpyFile(path, array)
        return self._files[name]


class _NpyFile:
    """An array that grows at its end, with rows like `row`; its header is written last."""

    def __init__(self, path: Path, row: np.ndarray) -> None:
        self._path = path
        self._row = row[:0]
        self.rows = 0
        self._file: BinaryIO = path.open("wb")
        # numpy leaves room in a header for the first dimension to grow.
        self._header()
        self._begin = self._file.tell()

    def append(self, rows: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(rows, dtype=self._row.dtype).data)
        self.rows += len(rows)

    def close(self) -> Path:
        self._file.seek(0)
        self._header()
        assert self._file.tell() == self._begin
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._path

    def _header(self) -> None:
        described = np.lib.format.header_data_from_array_1_0(self._row)
        described["shape"] = (self.rows, *self._row.shape[1:])
        np.lib.format.write_array_header_1_0(self._file, described)
