"""Turns a click log into a prepared folder.

Pass 1 learns from the training part, pass 2 writes all parts.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import polars as pl
import pyarrow

from stampede.data.errors import DataError
from stampede.data.learning.learned import COUNTS, Learned, rows_of_new_ids
from stampede.data.learning.learner import Learner
from stampede.data.learning.value_counts import Distinct
from stampede.data.options import PreparationOptions
from stampede.data.parallel import computed_ahead
from stampede.data.prepared.manifest import (
    BAD_ROWS,
    LEARNED_FOLDER,
    ShardEntry,
)
from stampede.data.prepared.writer import (
    RowsOfParts,
    Written,
    shares_of,
    write_manifest,
    write_rows,
)
from stampede.data.progress import RowProgress
from stampede.data.raw.log import Chunk, RawLog, has_soft_labels
from stampede.data.raw.rows import BadRows
from stampede.data.schema.features import described
from stampede.data.schema.schema import Quantiles, Schema
from stampede.data.sources import Source
from stampede.data.split import Assignment, divided
from stampede.files import make_folder
from stampede.settings import shown

# With fewer rows, a part could be empty.
_FEWEST_ROWS = 10

# Times sampled per part, and the share of newer training rows that gives advice.
_MOST_TIMES, _MOST_NEWER = 100_000, 0.1

_PART, _POSITION = "#part", "#position"


class Engine(Protocol):
    """What reads the rows of a log, twice; see `OneProcess` and `on_spark.py`."""

    def counts(self) -> list[int]:
        """Rows of each file."""
        ...

    def learn(self, learner: Learner, assignment: Assignment, bad_rows: BadRows) -> None:
        """Pass 1."""
        ...

    def write(
        self, learned: Learned, assignment: Assignment, new: Mapping[str, np.ndarray] | None
    ) -> Written:
        """Pass 2; see `write_rows`."""
        ...


# Makes one for a source, its options and the unfinished folder.
MakeEngine = Callable[[Source, PreparationOptions, Path], Engine]


def prepare(
    source: Source, options: PreparationOptions, folder: Path, engine: MakeEngine | None = None
) -> bool:
    """Prepare a log unless the folder exists. The folder appears only when it is complete.

    Args:
        engine: what reads the rows; by default this process.

    Returns:
        Whether the folder is new.

    Raises:
        DataError: the log cannot be used, or the folder cannot be written.
    """

    def fill(unfinished: Path) -> None:
        try:
            made = (engine or OneProcess)(source, options, unfinished)
            _prepare(source, options, unfinished, folder, made)
        except DataError:
            # A file that is still being written looks damaged.
            source.log.check_unchanged()
            raise

    return make_folder(folder, fill, DataError)


def _prepare(
    source: Source, options: PreparationOptions, folder: Path, place: Path, engine: Engine
) -> None:
    log, times = source.log, [time.perf_counter()]

    def clock() -> None:
        times.append(time.perf_counter())

    counts = None
    if source.split.needs_counts():
        counts = engine.counts()
        log.check_rows(counts)
        if sum(counts) < _FEWEST_ROWS:
            raise DataError(
                f"{log.files[0]}: too few rows to divide into parts ({sum(counts)}); give at "
                f"least {_FEWEST_ROWS}"
            )
    assignment = Assignment(source, counts)
    clock()
    remedy = f"{options.written}on_bad_row=skip to leave such rows out"
    bad_rows = BadRows(options.on_bad_row, folder / BAD_ROWS, remedy)
    learner = Learner(log.schema, int(options.counts_gb * 1e9), folder / COUNTS, source.growth)
    engine.learn(learner, assignment, bad_rows)
    if learner.rows == 0:
        log.check_rows(engine.counts())
        written = options.written
        raise DataError(
            f"{log.files[0]}: the training part has no rows (bad rows left out: "
            f"{bad_rows.count:,}); write {written}split=random or another split, or "
            f"{written}on_bad_row=error to see what is wrong with the rows"
        )
    clock()
    learned = learner.save(folder / LEARNED_FOLDER)
    clock()
    new = None if source.growth is None else rows_of_new_ids(folder / LEARNED_FOLDER)
    parts, unknown = engine.write(learned, assignment, new)
    shutil.rmtree(folder / COUNTS, ignore_errors=True)
    if options.split == "by_column":
        _check_named_parts(log, options, parts)
    log.check_unchanged()
    clock()
    stages = ("counting", "learning", "vocabularies", "writing")
    seconds = dict(zip(stages, np.diff(times).tolist(), strict=True))
    about = {**source.described(), "features": described(learned.schema), "seconds": seconds}
    if options.split == "sequential" and log.schema.time is not None:
        advice = _advice_on_order(folder, parts, log.schema.time.column, options.written)
        about |= {"advice": advice} if advice else {}
    if learner.soft_labels:
        columns = " or ".join(dict.fromkeys(one.column for one in log.schema.label.values()))
        learner.notes.append(
            f"labels between 0 and 1, as in column {columns}, are soft: each is trained on as the "
            "probability of a click"
        )
    about |= {"notes": learner.notes, "unknown_ids": shares_of(unknown, parts)}
    write_manifest(folder, log, learned, options, parts, bad_rows, about, source.growth, place)


def _check_named_parts(
    log: RawLog, options: PreparationOptions, parts: Mapping[str, Sequence[ShardEntry]]
) -> None:
    """Check that rows were found for each part that values of the split column name.

    Otherwise these rows, with their values spelled in another way, would be trained on.
    """
    for part, keys in (
        ("test", ("test_values", "test_from")),
        ("validation", ("validation_values",)),
    ):
        named = {key: getattr(options, key) for key in keys if getattr(options, key)}
        if named and not sum(shard.rows for shard in parts[part]):
            asked = " and ".join(f"{key}={value!r}" for key, value in named.items())
            raise DataError(
                f"{log.files[0]}: no row has {asked} in column {shown(options.split_column)}, so "
                f"the {part} part has no rows; write values as the column has them"
            )


def _advice_on_order(
    folder: Path, parts: Mapping[str, Sequence[ShardEntry]], column: str, written: str
) -> str:
    """Advice if a sequential split tests on rows that are not the newest, else empty."""

    def some_times(part: str) -> np.ndarray:
        step = 1 + sum(shard.rows for shard in parts[part]) // _MOST_TIMES
        files = [folder / shard.files["time"].name for shard in parts[part]]
        times = [np.load(file, mmap_mode="r")[::step] for file in files]
        return np.concatenate([np.empty(0, np.int64), *times])

    train, test = some_times("train"), some_times("test")
    newer = (train > np.median(test)).mean() if len(test) else 0.0
    if newer < _MOST_NEWER:
        return ""
    keys = ("split=by_column", f"split_column={column}", "test_from=VALUE")
    return (
        f"{newer:.0%} of the training rows are newer than half of the test rows, but "
        "split=sequential assumes that the last rows of the log are the newest: sort the log by "
        f"{shown(column)}, or write " + " ".join(f"{written}{shlex.quote(key)}" for key in keys)
    )


class OneProcess:
    """Reads and writes the rows here."""

    def __init__(self, source: Source, options: PreparationOptions, folder: Path) -> None:
        self._log, self._options, self._folder = source.log, options, folder
        self._spool = Spool(folder / "spool", source.log.schema) if options.spool else None

    def counts(self) -> list[int]:
        """Rows of each file."""
        return self._log.counts()

    def learn(self, learner: Learner, assignment: Assignment, bad_rows: BadRows) -> None:
        """Pass 1."""
        with RowProgress("pass 1 of 2, learning", self._log.bytes) as progress:

            def learn(chunk: Chunk) -> None:
                rows = divided(chunk, self._log.schema, assignment)
                learner.soft_labels |= has_soft_labels(chunk.frame, self._log.schema)
                learner.add(rows.train, rows.distinct_of_train)
                if self._spool is not None:
                    spooled = rows.frame, rows.parts, chunk.position, rows.distinct
                    self._spool.append(RowsOfParts(*spooled))
                progress.advance_to(chunk.position, len(chunk.numbers))

            # In a thread, while this one parses the next rows.
            for _ in computed_ahead(learn, self._log.chunks(bad_rows), 1):
                pass

    def write(
        self, learned: Learned, assignment: Assignment, new: Mapping[str, np.ndarray] | None
    ) -> Written:
        """Pass 2."""
        rows = self._spool
        if rows is None:
            # Pass 1 has reported the bad rows.
            again = self._log.chunks(BadRows(self._options.on_bad_row))
            rows = (RowsOfParts(c.frame, assignment.parts(c), c.position) for c in again)
        with RowProgress("pass 2 of 2, writing", self._log.bytes) as progress:
            found = write_rows(self._folder, rows, learned, self._options, progress, new)
        shutil.rmtree(self._folder / "spool", ignore_errors=True)
        return found


class Spool:
    """Keeps parsed rows on disk between the two passes, so that a log is parsed once.

    Each chunk is an Arrow file of a new folder, deleted when read; ids of vocabularies are columns
    with dictionaries.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        self._folder = folder
        cut = (name for name, field in schema.ids.items() if isinstance(field, Quantiles))
        self._numbers = [*schema.numbers, *cut]
        self._count = 0
        folder.mkdir()

    def append(self, rows: RowsOfParts) -> None:
        """Store typed rows, with the columns of `distinct_ids` in `distinct`."""
        if not len(rows.parts):
            return
        # This is exact, see `number_of`.
        frame = rows.frame.with_columns(pl.col(self._numbers).cast(pl.Float32))
        table = frame.with_columns(pl.Series(_PART, rows.parts)).to_arrow()
        for name, (values, codes) in rows.distinct.items():
            ids = pyarrow.DictionaryArray.from_arrays(codes, values.to_arrow())
            table = table.append_column(name, ids)
        table = table.replace_schema_metadata({_POSITION: str(rows.position)})
        with pyarrow.ipc.new_file(self._folder / f"{self._count}.arrow", table.schema) as file:
            file.write_table(table)
        self._count += 1

    def __iter__(self) -> Iterator[RowsOfParts]:
        for number in range(self._count):
            path = self._folder / f"{number}.arrow"
            table = pyarrow.ipc.open_file(path).read_all().combine_chunks()
            path.unlink()
            position = int(table.schema.metadata[_POSITION.encode()])
            distinct = {
                name: Distinct(pl.Series(ids.chunk(0).dictionary), ids.chunk(0).indices.to_numpy())
                for name, ids in zip(table.column_names, table.columns, strict=True)
                if pyarrow.types.is_dictionary(ids.type)
            }
            frame = pl.from_arrow(table.drop_columns(list(distinct)))
            rows = frame.drop(_PART).with_columns(pl.col(self._numbers).cast(pl.Float64))
            yield RowsOfParts(rows, frame[_PART].to_numpy(), position, distinct)
