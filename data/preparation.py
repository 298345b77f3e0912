"""From a raw log to a prepared folder: learn on the training part, then write."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
from pydantic import Field

from stampede.data.errors import DataError
from stampede.data.learning import Learned, Learner
from stampede.data.learning.distinct import distinct_ids
from stampede.data.overlap import while_made
from stampede.data.progress import RowProgress
from stampede.data.raw import BadRows, Chunk
from stampede.data.schema.features import Features, described
from stampede.data.sources import Source
from stampede.data.splits import TRAIN, Assignment, Split
from stampede.data.spool import Spool, Spooled
from stampede.data.writing import (
    BAD_ROWS,
    LEARNED_FOLDER,
    WritingOptions,
    write_manifest,
    write_rows,
)
from stampede.files import make_folder

# With fewer, a part may be left without a row.
_FEWEST_ROWS = 10


class PreparationOptions(WritingOptions, Split):
    """How a log is prepared."""

    features: Features = Field(
        "auto",
        description="what the schema leaves open. auto: ids seen once share a row, numbers are "
        "standardised, their logarithm where they are skewed, with their quantile bins as ids "
        "besides, hour of the day and weekday of times; paper: a row for each id, numbers from 0 "
        "to 1",
    )
    counts_gb: float = Field(
        2.0, gt=0, description="memory for the counts of ids; above it they go to disk"
    )
    spool: bool = Field(
        True,
        description="keep what pass 1 read for pass 2, beside the result: about half the size "
        "of the plain log; false reads the log again",
    )


def prepare(source: Source, options: PreparationOptions, folder: Path) -> bool:
    """Prepare a log unless the folder is there; it appears when it is whole.

    Args:
        source: the log.
        options: how.
        folder: where to.

    Returns:
        Whether it was not there yet.

    Raises:
        DataError: the log cannot be used or the folder cannot be written.
    """

    def make(unfinished: Path) -> None:
        _Preparation(source, options, unfinished).run()

    return make_folder(folder, make, DataError)


class _Preparation:
    """One preparation into an empty folder."""

    def __init__(self, source: Source, options: PreparationOptions, folder: Path) -> None:
        self._source = source
        self._log = source.log
        self._options = options
        self._folder = folder

    def run(self) -> None:
        options, folder = self._options, self._folder
        started = time.perf_counter()
        assignment = self._assignment()
        option = f"{options.written}on_bad_row=skip"
        bad_rows = BadRows(options.on_bad_row, folder / BAD_ROWS, option)
        spool = Spool(folder / "spool", self._log.schema) if options.spool else None
        counted = time.perf_counter()
        learned = self._learn(assignment, bad_rows, spool)
        if spool is not None and learned.takes_hashes:
            rows = iter(spool)
        else:
            rows = self._read_again(assignment)
        learnt = time.perf_counter()
        with RowProgress("pass 2 of 2, writing", self._log.bytes) as progress:
            parts = write_rows(folder, rows, learned, options, progress)
        shutil.rmtree(folder / "spool", ignore_errors=True)
        seconds = {
            "counting": counted - started,
            "learning": learnt - counted,
            "writing": time.perf_counter() - learnt,
        }
        features = described(learned.schema)
        source = {**self._source.described(), "features": features, "seconds": seconds}
        write_manifest(folder, self._log, learned, options, parts, bad_rows, source)

    def _read_again(self, assignment: Assignment) -> Iterator[Spooled]:
        # Bad rows were told of in the first pass.
        for chunk in self._log.chunks(BadRows(self._options.on_bad_row)):
            yield Spooled(chunk.frame, assignment.parts(chunk), chunk.position)

    def _assignment(self) -> Assignment:
        counts = None
        if self._source.split.needs_counts():
            with RowProgress("counting rows", self._log.bytes) as progress:
                counts = self._log.counts(progress.advance_to)
            self._log.check_rows()
            if sum(counts) < _FEWEST_ROWS:
                raise DataError(
                    f"{self._log.files[0]}: {sum(counts)} rows are too few to divide into parts; "
                    f"need {_FEWEST_ROWS} or more"
                )
        source = self._source
        return Assignment(source.split, counts, source.test_share, source.file_parts)

    def _learn(self, assignment: Assignment, bad_rows: BadRows, spool: Spool | None) -> Learned:
        counts = self._folder / "counts"
        learner = Learner(self._log.schema, int(self._options.counts_gb * 1e9), counts)
        with RowProgress("pass 1 of 2, learning", self._log.bytes) as progress:

            def learn(chunk: Chunk) -> None:
                parts = assignment.parts(chunk)
                distinct = distinct_ids(chunk.frame, self._log.schema)
                frame = chunk.frame.drop(distinct)
                train = parts == TRAIN
                learner.add(
                    frame if train.all() else frame.filter(pl.Series(train)),
                    {name: column.take(train) for name, column in distinct.items()},
                )
                if spool is not None:
                    spool.append(Spooled(frame, parts, chunk.position, distinct))
                progress.advance_to(chunk.position, len(chunk.numbers))

            while_made(self._log.chunks(bad_rows), learn)
        if learner.rows == 0:
            self._log.check_rows()
            written = self._options.written
            raise DataError(
                f"{self._log.files[0]}: the training part has no row ({bad_rows.count:,} bad rows "
                f"were left out); write {written}split=random or another split, or "
                f"{written}on_bad_row=error to see what is wrong with the rows"
            )
        learned = learner.save(self._folder / LEARNED_FOLDER)
        shutil.rmtree(counts, ignore_errors=True)
        return learned
