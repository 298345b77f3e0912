# pyright: basic
"""Prepares a log on Spark: each task reads a file, and the code for its rows is the same as here.

All processes must see the log's files and the prepared folder under the same paths. Tasks leave
what they made in that folder; Spark adds up the counts of ids and moves no rows.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import polars as pl

from stampede.data.errors import DataError
from stampede.data.learning.learned import EncodedBag, Learned, Learner, Measured, load
from stampede.data.learning.unknown_shares import UnknownIds
from stampede.data.learning.vocabulary import COUNT, VALUE
from stampede.data.options import PreparationOptions
from stampede.data.prepared.manifest import LEARNED_FOLDER, PARTS, PartName, ShardEntry
from stampede.data.prepared.writer import PartWriter, RowsOfParts, Written, write_rows
from stampede.data.progress import RowProgress
from stampede.data.raw.log import Labels, has_soft_labels
from stampede.data.raw.rows import BadRows
from stampede.data.sources import Source
from stampede.data.split import Assignment, divided
from stampede.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

_COUNTS, _PIECES = "counts", "pieces"


class FileLearned(NamedTuple):
    """What a task learned of a file, besides the counts that it wrote."""

    rows: np.ndarray  # `[3]` int64, of each part
    numbers: list[Measured]  # by piece of the file, in order
    soft_labels: bool
    labels: list[Labels]
    bad_rows: BadRows


def session(master: str) -> SparkSession:
    """The Spark session of this process, or a new one.

    Args:
        master: such as `local[2]` or `spark://host:7077`; see also Spark's own settings.

    Raises:
        SettingsError: PySpark or Java is not installed, or the master does not answer.
    """
    # Tasks run in the environment of this process.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError:
        raise SettingsError(
            "--spark needs the package pyspark, which is not installed; run: pip install "
            "'pyspark>=4,<5'"
        ) from None
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise SettingsError(
            "--spark needs Java 17, and there is no `java`; install it, such as Debian's "
            "openjdk-17-jre-headless, or set JAVA_HOME"
        )
    builder = SparkSession.builder.appName("stampede").master(master)
    if "SPARK_LOCAL_IP" not in os.environ and master.startswith("local"):
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
        builder = builder.config("spark.driver.host", "127.0.0.1")
    try:
        found = builder.config("spark.ui.enabled", "false").getOrCreate()
    except (PySparkException, RuntimeError) as failure:
        raise SettingsError(f"--spark {master}: Spark does not start ({failure!s:.300})") from None
    found.sparkContext.setLogLevel("ERROR")
    return found


@dataclass
class OnSpark:
    """An `Engine` whose rows are read by Spark's tasks, one for each file.

    Args:
        session: Spark's.
        folder: the unfinished prepared folder.
    """

    session: SparkSession
    source: Source
    options: PreparationOptions
    folder: Path
    _counts: list[int] | None = None
    # By file, rows of each part.
    _rows: np.ndarray = field(default_factory=lambda: np.zeros((0, len(PARTS)), np.int64))

    def counts(self) -> list[int]:
        """Rows of each file."""
        if self._counts is None:
            self._counts = self._each(len(self.source.log.files), _Count(self.source))
        return self._counts

    def learn(self, learner: Learner, assignment: Assignment, bad_rows: BadRows) -> None:
        """Pass 1."""
        files = self.source.log.files
        task = _Learn(self.source, self.options, self.folder, assignment)
        labels, found = self.source.log.labels(), self._each(len(files), task)
        for file, one in zip(files, found, strict=True):
            bad_rows.add(one.bad_rows)
            for all_files, of_file in zip(labels, one.labels, strict=True):
                all_files.add(of_file, file)
            learner.soft_labels |= one.soft_labels
            for measured in one.numbers:
                learner.merge(measured)
        self._rows = np.stack([one.rows for one in found])
        names = list(learner.counts.names)
        # `save` asks for the tables only.
        learner.counts = cast(Any, _AddedUp)(self.session, self.folder / _COUNTS, names)

    def write(
        self, learned: Learned, assignment: Assignment, new: Mapping[str, np.ndarray] | None
    ) -> Written:
        """Pass 2."""
        before = np.cumsum(self._rows, 0) - self._rows
        task = _Write(self.source, self.options, self.folder, assignment, before, new)
        unknown: dict[PartName, UnknownIds] = {one: UnknownIds(learned.fields) for one in PARTS}
        for of_file in self._each(len(before), task):
            for part, counts in zip(PARTS, of_file, strict=True):
                unknown[part].counts += counts
        shards: list[tuple[Any, int]] = [
            (part, shard)
            for part, rows in zip(PARTS, self._rows.sum(0), strict=True)
            for shard in range(-(-int(rows) // self.options.shard_rows))
        ]
        joined = self._each(len(shards), _Join(self.folder, self.options.shard_rows, shards))
        parts: dict[Any, list[ShardEntry]] = {part: [] for part in PARTS}
        for (part, _), entry in zip(shards, joined, strict=True):
            parts[part].append(entry)
        shutil.rmtree(self.folder / _PIECES, ignore_errors=True)
        return parts, unknown

    def _each(self, tasks: int, work: Callable[[int], T]) -> list[T]:
        """The results of tasks; the error of the first that the user's data made fail."""
        if not tasks:
            return []
        context = self.session.sparkContext
        done = context.parallelize(range(tasks), tasks).map(_Told(work)).collect()
        for _, mistake in done:
            if mistake is not None:
                raise mistake
        return [result for result, _ in done]


@dataclass
class _Told:
    """Brings a `DataError` to the driver as it is; Spark would make a traceback of it."""

    work: Callable[[int], Any]

    def __call__(self, number: int) -> tuple[Any, DataError | None]:
        try:
            return self.work(number), None
        except DataError as mistake:
            return None, mistake


@dataclass
class _Count:
    source: Source

    def __call__(self, number: int) -> int:
        return self.source.log.count(number)


@dataclass
class _Learn:
    source: Source
    options: PreparationOptions
    folder: Path
    assignment: Assignment

    def __call__(self, number: int) -> FileLearned:
        log = self.source.log
        place = self.folder / _PIECES / f"{number:06d}"
        # Left by a task that Spark has repeated.
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        budget = int(self.options.counts_gb * 1e9)
        learner = Learner(log.schema, budget, place / _COUNTS, self.source.growth)
        remedy = f"{self.options.written}on_bad_row=skip to leave such rows out"
        bad_rows = BadRows(self.options.on_bad_row, place / "bad_rows.jsonl", remedy)
        rows, numbers, labels = np.zeros(len(PARTS), np.int64), [], log.labels()
        soft_labels = False
        for chunk in log.chunks(bad_rows, number, labels):
            some = divided(chunk, log.schema, self.assignment)
            learner.counts.add(some.train, some.distinct_of_train)
            numbers.append(learner.measured(some.train))
            rows += np.bincount(some.parts, minlength=len(PARTS))
            soft_labels |= has_soft_labels(chunk.frame, log.schema)
        for at, name in enumerate(learner.counts.names):
            counted = self.folder / _COUNTS / str(at) / f"{number:06d}"
            shutil.rmtree(counted, ignore_errors=True)
            counted.mkdir(parents=True)
            for part, table in enumerate(learner.counts.tables(name)):
                counts = table.with_columns(pl.col(COUNT).cast(pl.Int64))
                counts.write_parquet(counted / f"{part}.parquet")
        return FileLearned(rows, numbers, soft_labels, labels, bad_rows)


class _AddedUp:
    """The counts of all files, in place of `ValueCounts`; Spark adds them up."""

    def __init__(self, session: SparkSession, folder: Path, names: Sequence[str]) -> None:
        self._session, self._folder, self.names = session, folder, names

    def tables(self, name: str) -> Iterator[pl.DataFrame]:
        """Tables of `value` and `count`; each value is in one of them."""
        folder = self._folder / str(self.names.index(name))
        files = [str(file) for file in sorted(folder.glob("*/*.parquet"))]
        if not files:
            return
        added = folder / "added"
        counts = self._session.read.parquet(*files).groupBy(VALUE).sum(COUNT)
        counts.withColumnRenamed(f"sum({COUNT})", COUNT).write.parquet(added.as_uri())
        for file in sorted(added.glob("*.parquet")):
            yield pl.read_parquet(file)
        shutil.rmtree(folder)


@dataclass
class _Write:
    source: Source
    options: PreparationOptions
    folder: Path
    assignment: Assignment
    before: np.ndarray
    new: Mapping[str, np.ndarray] | None

    def __call__(self, number: int) -> list[np.ndarray]:
        """Write a file's rows; the counts of `UnknownIds` of each part."""
        log, place = self.source.log, self.folder / _PIECES / f"{number:06d}"
        learned = load(self.folder / LEARNED_FOLDER)
        rows = (
            RowsOfParts(chunk.frame, self.assignment.parts(chunk), chunk.position)
            for chunk in log.chunks(BadRows(self.options.on_bad_row), number)
        )
        with RowProgress("writing", log.bytes) as progress:
            before = self.before[number].tolist()
            _, unknown = write_rows(place, rows, learned, self.options, progress, self.new, before)
        return [unknown[part].counts for part in PARTS]


@dataclass
class _Join:
    folder: Path
    shard_rows: int
    shards: Sequence[tuple[PartName, int]]

    def __call__(self, number: int) -> ShardEntry:
        """Make a shard of the pieces that tasks wrote of it."""
        part, shard = self.shards[number]
        writer = PartWriter(self.folder, part, self.shard_rows, shard * self.shard_rows)
        stem = f"{part}-{shard:05d}-"
        for place in sorted((self.folder / _PIECES).iterdir()):
            files = {path.stem.removeprefix(stem): path for path in place.glob(f"{stem}*.npy")}
            if not files:
                continue
            arrays = {name: np.load(path, mmap_mode="r") for name, path in files.items()}
            bags = []
            while f"offsets_{len(bags)}" in arrays:
                at = len(bags)
                lengths = np.diff(arrays.pop(f"offsets_{at}"))
                of_ids = (arrays.pop(f"{kind}_{at}", None) for kind in ("values", "weights"))
                bags.append(EncodedBag(lengths, *of_ids))
            writer.append(arrays, bags)
        (entry,) = writer.finish()
        return entry
