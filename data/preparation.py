"""From a raw log to a prepared folder: learn on the training part, then write."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from pydantic import Field
from tqdm import tqdm

from stampede.data.errors import DataError
from stampede.data.learning import Learned, Learner
from stampede.data.learning.learned import load
from stampede.data.overlap import computed_ahead, while_made
from stampede.data.prepared.checksum import file_entry
from stampede.data.prepared.manifest import MANIFEST, PARTS, Manifest, PartName, ShardEntry
from stampede.data.prepared.shard_writer import SHARD_ROWS, PartWriter
from stampede.data.prepared.whole_folder import make_whole
from stampede.data.progress import RowProgress
from stampede.data.raw import BadRows, Chunk, RawLog
from stampede.data.raw.bad_rows import OnBadRow
from stampede.data.raw.typed import LABEL, TIME, WEIGHT
from stampede.data.sources import Source
from stampede.data.splits import TEST, TRAIN, Assignment, Split
from stampede.data.spool import Spool, Spooled

LEARNED_FOLDER = "learned"
BAD_ROWS = "bad_rows.jsonl"

_Arrays = dict[str, np.ndarray]
_Bags = list[tuple[np.ndarray, np.ndarray]]


class PreparationOptions(Split):
    """How a log is prepared."""

    on_bad_row: OnBadRow = Field(
        "error", description="a row that cannot be read: error, or skip: left out and written aside"
    )
    numbers_dtype: Literal["float32", "float16"] = Field(
        "float32", description="type of the numbers on disk"
    )
    counts_gb: float = Field(
        2.0, gt=0, description="memory for the counts of ids; above it they go to disk"
    )
    spool: bool = Field(
        True,
        description="keep what pass 1 read for pass 2, beside the result: about 1.2 times the size "
        "of the plain log; false reads the log again",
    )
    shard_rows: int = Field(SHARD_ROWS, ge=1, description="rows in a file of the prepared form")


def prepare(
    source: Source, options: PreparationOptions, folder: Path, learned_from: Path | None = None
) -> None:
    """Prepare a log unless the folder is there; it appears when it is whole.

    Args:
        source: the log.
        options: how.
        folder: where to.
        learned_from: a prepared folder whose vocabularies and ranges are used; nothing is learned
            then, and all rows are of the test part.

    Raises:
        DataError: the log cannot be used or the folder cannot be written.
    """
    make_whole(
        folder, lambda unfinished: _Preparation(source, options, unfinished).run(learned_from)
    )


class _Preparation:
    """One preparation into an empty folder."""

    def __init__(self, source: Source, options: PreparationOptions, folder: Path) -> None:
        self._source = source
        self._log = source.log
        self._options = options
        self._folder = folder

    def run(self, learned_from: Path | None) -> None:
        bad_rows = BadRows(self._options.on_bad_row, self._folder / BAD_ROWS)
        if learned_from is None:
            assignment = self._assignment()
            spool = Spool(self._folder / "spool", self._log.schema) if self._options.spool else None
            learned = self._learn(assignment, bad_rows, spool)
            title = "pass 2 of 2, writing"
            if spool is not None and learned.takes_hashes:
                rows = iter(spool)
            else:
                # Bad rows were told of in the first pass.
                again = BadRows(self._options.on_bad_row)
                rows = (
                    Spooled(chunk.frame, assignment.parts(chunk), chunk.position)
                    for chunk in self._log.chunks(again)
                )
        else:
            shutil.copytree(learned_from / LEARNED_FOLDER, self._folder / LEARNED_FOLDER)
            learned = load(self._folder / LEARNED_FOLDER)
            # What was learned fits the columns that it was learned from.
            self._log = RawLog(learned.schema, self._log.files)
            title = "writing"
            rows = (
                Spooled(
                    chunk.frame, np.full(len(chunk.numbers), TEST, dtype=np.int8), chunk.position
                )
                for chunk in self._log.chunks(bad_rows)
            )
        parts = self._write(title, rows, learned)
        shutil.rmtree(self._folder / "spool", ignore_errors=True)
        self._describe(parts, learned, learned_from, bad_rows.count)

    def _assignment(self) -> Assignment:
        counts = None
        if self._source.split.needs_counts():
            with RowProgress("counting rows", self._log.bytes) as progress:
                counts = self._log.counts(progress.advance_to)
        source = self._source
        return Assignment(source.split, counts, source.test_share, source.file_parts)

    def _learn(self, assignment: Assignment, bad_rows: BadRows, spool: Spool | None) -> Learned:
        counts = self._folder / "counts"
        learner = Learner(self._log.schema, int(self._options.counts_gb * 1e9), counts)
        with RowProgress("pass 1 of 2, learning", self._log.bytes) as progress:

            def learn(chunk: Chunk) -> None:
                parts = assignment.parts(chunk)
                learner.add(chunk.take(parts == TRAIN).frame)
                if spool is not None:
                    spool.append(chunk.frame, parts, chunk.position)
                progress.advance_to(chunk.position, len(chunk.numbers))

            while_made(self._log.chunks(bad_rows), learn)
        if learner.rows == 0:
            raise DataError(
                f"{self._log.files[0]}: the training part has no row ({bad_rows.count:,} bad rows "
                "were left out); change the split, or look at the rows with on_bad_row=error"
            )
        learned = learner.save(self._folder / LEARNED_FOLDER)
        shutil.rmtree(counts, ignore_errors=True)
        return learned

    def _write(
        self, title: str, rows: Iterable[Spooled], learned: Learned
    ) -> dict[PartName, list[ShardEntry]]:
        writers = {part: PartWriter(self._folder, part, self._options.shard_rows) for part in PARTS}
        dtype = self._options.numbers_dtype

        def encode(some: Spooled) -> tuple[Spooled, _Arrays, _Bags]:
            return some, *_arrays(some.frame, learned, dtype)

        with RowProgress(title, self._log.bytes) as progress:
            for some, arrays, bags in computed_ahead(encode, rows, 2, threads=2):
                for number, part in enumerate(PARTS):
                    mask = some.parts == number
                    if mask.any():
                        writers[part].append(*_masked(arrays, bags, mask))
                progress.advance_to(some.position, len(some.parts))
        return {part: writer.finish() for part, writer in writers.items()}

    def _describe(
        self,
        parts: dict[PartName, list[ShardEntry]],
        learned: Learned,
        learned_from: Path | None,
        bad_rows: int,
    ) -> None:
        schema = self._log.schema
        manifest = Manifest(
            version=metadata.version("stampede"),
            fields=learned.fields,
            numbers=list(schema.numbers),
            ids_dtype=learned.ids_dtype,
            numbers_dtype=self._options.numbers_dtype,
            has_weight=schema.weight is not None,
            has_time=schema.time is not None,
            parts=parts,
            learned=[
                file_entry(path, self._folder)
                for path in sorted((self._folder / LEARNED_FOLDER).iterdir())
            ],
            bad_rows=bad_rows,
            source={
                "files": [str(file) for file in self._log.files],
                "learned_from": None if learned_from is None else str(learned_from),
                "options": self._options.model_dump(mode="json"),
                **self._source.described(),
            },
        )
        (self._folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        if bad_rows:
            tqdm.write(f"{bad_rows:,} bad rows were left out; see {BAD_ROWS}")


def _arrays(frame: pl.DataFrame, learned: Learned, numbers_dtype: str) -> tuple[_Arrays, _Bags]:
    """Arrays of the manifest's names, and lengths and values of the multi-valued fields."""
    encoded = learned.encode(frame, numbers_dtype)
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
