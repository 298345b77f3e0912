# pyright: basic
"""Prepares a log on Spark: each task reads a stretch of a file, with the code for rows of here.

All processes must see the log's files and the prepared folder under the same paths. Tasks leave
what they made in that folder; Spark adds up the counts of ids and moves no rows. Spark may run a
task twice, also at once, so each attempt has a folder of its own, and its result names it.

Tasks are of RDDs, not `mapInArrow`, as Spark's own readers parse texts in another way than ours.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from uuid import uuid4

import numpy as np
import polars as pl

from stampede import stores
from stampede.data.errors import DataError
from stampede.data.learning import COUNT, VALUE
from stampede.data.learning.learned import COUNTS, INDEXES, EncodedBag, Learned, load
from stampede.data.learning.learner import Learner, Measured
from stampede.data.learning.unknown_shares import UnknownIds
from stampede.data.options import PreparationOptions
from stampede.data.prepared.manifest import LEARNED_FOLDER, PARTS, PartName, ShardEntry
from stampede.data.prepared.writer import PartWriter, RowsOfParts, Written, write_rows
from stampede.data.progress import RowProgress
from stampede.data.raw.files import Stretch
from stampede.data.raw.formats import WHOLE
from stampede.data.raw.log import has_soft_labels
from stampede.data.raw.rows import BadRows
from stampede.data.raw.typed import Labels
from stampede.data.sources import Source
from stampede.data.split import Assignment, divided
from stampede.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

_PIECES, _NAME = "pieces", "name"

# Blocks or batches of a task's stretch: 64 MB of text, or a million rows.
_MOST_PIECES = 4

# The number of a file, and a stretch of it.
Place = tuple[int, Stretch]


class PlaceLearned(NamedTuple):
    """What a task learned of its stretch."""

    # By type of values, a folder with files of `_NAME` (the place of a name of `ValueCounts`),
    # `value`, `count`.
    counts: dict[str, Path]
    rows: np.ndarray  # `[3]` int64, of each part
    numbers: list[Measured]  # by piece, in order
    soft_labels: bool
    labels: list[Labels]
    bad_rows: BadRows


def session(master: str, key: str = "--spark") -> SparkSession:
    """The Spark session of this process, or a new one.

    Args:
        master: such as `local[2]` or `spark://host:7077`; see also Spark's own settings.
        key: what the user wrote before it.

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
            f"{key} needs the package pyspark, which is not installed; run: pip install "
            "'pyspark>=4,<5'"
        ) from None
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise SettingsError(
            f"{key} needs Java 17, and there is no `java`; install it, such as Debian's "
            "openjdk-17-jre-headless, or set JAVA_HOME"
        )
    builder = SparkSession.builder.appName("stampede").master(master)
    if "SPARK_LOCAL_IP" not in os.environ and master.startswith("local"):
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
        builder = builder.config("spark.driver.host", "127.0.0.1")
    try:
        found = builder.config("spark.ui.enabled", "false").getOrCreate()
    except (PySparkException, RuntimeError) as failure:
        raise SettingsError(f"{key} {master}: Spark does not start ({failure!s:.300})") from None
    found.sparkContext.setLogLevel("ERROR")
    return found


@contextmanager
def engine_of(
    master: str | None, key: str = "--spark"
) -> Iterator[Callable[[Source, PreparationOptions, Path], OnSpark] | None]:
    """What prepares on Spark's master; None for this process. See `session`.

    Spark starts with the first preparation: what is prepared already needs none.
    """
    if master is None:
        yield None
        return
    with ExitStack() as at_end:

        def start(source: Source, options: PreparationOptions, folder: Path) -> OnSpark:
            # A session of another thread is not this thread's active one, but has the context.
            before = sys.modules.get("pyspark")
            is_ours = before is None or before.SparkContext._active_spark_context is None
            found = session(master, key)
            if is_ours:
                # Its workers and memory are needed for other things.
                at_end.callback(found.stop)
            return OnSpark(found, source, options, folder)

        yield start


@dataclass
class OnSpark:
    """An `Engine` whose rows are read by Spark's tasks, one for each stretch of a file.

    Args:
        session: Spark's.
        folder: the unfinished prepared folder.
    """

    session: SparkSession
    source: Source
    options: PreparationOptions
    folder: Path
    _counts: dict[int, int] = field(default_factory=dict)
    # By task, rows of each part.
    _rows: np.ndarray = field(default_factory=lambda: np.zeros((0, len(PARTS)), np.int64))

    def __post_init__(self) -> None:
        # Tasks may have another working folder.
        self.folder = self.folder.absolute()
        log = copy(self.source.log)
        log.files = [file if stores.is_url(file) else file.absolute() for file in log.files]
        self.source = replace(self.source, log=log)

    def counts(self) -> list[int]:
        """Rows of each file."""
        _ = self.tasks
        others = [file for file in range(len(self.source.log.files)) if file not in self._counts]
        counted = self._each(len(others), _Count(self.source, others))
        self._counts |= zip(others, counted, strict=True)
        return [self._counts[file] for file in sorted(self._counts)]

    @cached_property
    def tasks(self) -> list[Place]:
        """What each task reads, in order; counts the rows of files that are divided."""
        files = self._each(len(self.source.log.files), _Divide(self.source, _MOST_PIECES))
        places = [(n, one) for n, of in enumerate(files) if len(of) > 1 for one in of]
        found = self._each(len(places), _Survey(self.source, places))
        before, tasks = Counter(), []
        for (file, stretch), (rows, _) in zip(places, found, strict=True):
            tasks.append((file, stretch._replace(rows=before[file])))
            before[file] += rows
        whole = {
            file
            for (file, _), (_, is_separate) in zip(places, found, strict=True)
            if not is_separate
        }
        whole |= set(range(len(files))) - before.keys()
        self._counts = {file: rows for file, rows in before.items() if file not in whole}
        tasks = [one for one in tasks if one[0] not in whole] + [(file, WHOLE) for file in whole]
        return sorted(tasks, key=lambda one: (one[0], one[1].rows))

    def learn(self, learner: Learner, assignment: Assignment, bad_rows: BadRows) -> None:
        """Pass 1."""
        task = _Learn(self.source, self.options, self.folder, assignment, self.tasks)
        labels, found = self.source.log.labels(), self._each(len(self.tasks), task)
        for (file, _), one in zip(self.tasks, found, strict=True):
            bad_rows.add(one.bad_rows)
            for all_files, of_place in zip(labels, one.labels, strict=True):
                all_files.add(of_place, self.source.log.files[file])
            learner.soft_labels |= one.soft_labels
            for measured in one.numbers:
                learner.merge(measured)
        self._rows = np.stack([one.rows for one in found])
        folders: dict[str, list[Path]] = defaultdict(list)
        for kind, place in chain.from_iterable(one.counts.items() for one in found):
            folders[kind].append(place)
        with failures_told():
            added = _AddedUp(self.session, self.folder / COUNTS, learner.counts.names, folders)
        # `save` asks for the tables only.
        learner.counts = cast(Any, added)

    def write(
        self, learned: Learned, assignment: Assignment, new: Mapping[str, np.ndarray] | None
    ) -> Written:
        """Pass 2."""
        before = np.cumsum(self._rows, 0) - self._rows
        given = self.source, self.options, self.folder, assignment, self.tasks
        task = _Write(*given, before, new, uuid4().hex)
        unknown: dict[PartName, UnknownIds] = {one: UnknownIds(learned.fields) for one in PARTS}
        written = self._each(len(before), task)
        folders: dict[tuple[PartName, int], list[Path]] = defaultdict(list)
        firsts = (before // self.options.shard_rows).tolist()
        for (place, of_place), first in zip(written, firsts, strict=True):
            for part, begin, (shards, counts) in zip(PARTS, first, of_place, strict=True):
                unknown[part].counts += counts
                for shard in range(begin, begin + shards):
                    folders[part, shard].append(place)
        join = _Join(self.folder, self.options.shard_rows, list(folders.items()))
        parts: dict[PartName, list[ShardEntry]] = {part: [] for part in PARTS}
        for (part, _), entry in zip(folders, self._each(len(folders), join), strict=True):
            parts[part].append(entry)
        shutil.rmtree(self.folder / _PIECES, ignore_errors=True)
        return parts, unknown

    def _each(self, tasks: int, work: Callable[[int], T]) -> list[T]:
        """The results of tasks; the error of the first that the user's data made fail."""
        if not tasks:
            return []
        context = self.session.sparkContext
        with failures_told():
            done = context.parallelize(range(tasks), tasks).map(_Told(work)).collect()
        for _, mistake in done:
            if mistake is not None:
                raise mistake
        return [result for result, _ in done]


@contextmanager
def failures_told() -> Iterator[None]:
    """Tell in a sentence what fails in Spark itself, such as a worker that was killed."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as failure:
        # The last error of Python, if there is one, is the cause of the others.
        found = re.findall(r"^(\w[\w.]*(?:Error|Exception)\b.*)", str(failure), re.MULTILINE)
        reason = [str(failure).strip().partition("\n")[0], *found][-1]
        raise DataError(f"Spark failed ({reason:.300}); see the log of its workers") from failure


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
    files: Sequence[int]

    def __call__(self, number: int) -> int:
        return self.source.log.count(self.files[number])


@dataclass
class _Divide:
    source: Source
    most: int

    def __call__(self, number: int) -> list[Stretch]:
        return self.source.log.stretches(number, self.most)


@dataclass
class _Survey:
    source: Source
    places: Sequence[Place]

    def __call__(self, number: int) -> tuple[int, bool]:
        return self.source.log.survey(*self.places[number])


@dataclass
class _Learn:
    source: Source
    options: PreparationOptions
    folder: Path
    assignment: Assignment
    places: Sequence[Place]

    def __call__(self, number: int) -> PlaceLearned:
        log = self.source.log
        place = _place_of_attempt(self.folder)
        budget = int(self.options.counts_gb * 1e9)
        learner = Learner(log.schema, budget, place / COUNTS, self.source.growth)
        remedy = f"{self.options.written}on_bad_row=skip to leave such rows out"
        bad_rows = BadRows(self.options.on_bad_row, place / "bad_rows.jsonl", remedy)
        rows, numbers, labels = np.zeros(len(PARTS), np.int64), [], log.labels()
        soft_labels = False
        for chunk in log.chunks(bad_rows, self.places[number], labels):
            some = divided(chunk, log.schema, self.assignment)
            learner.counts.add(some.train, some.distinct_of_train)
            numbers.append(learner.measured(some.train))
            rows += np.bincount(some.parts, minlength=len(PARTS))
            soft_labels |= has_soft_labels(chunk.frame, log.schema)
        counts = {}
        for at, name in enumerate(learner.counts.names):
            for part, table in enumerate(learner.counts.tables(name)):
                kind = str(table.schema[VALUE])
                counts[kind] = place / kind
                counts[kind].mkdir(exist_ok=True)
                table = table.select(pl.lit(at).alias(_NAME), VALUE, pl.col(COUNT).cast(pl.Int64))
                table.write_parquet(counts[kind] / f"{at}-{part}.parquet")
        return PlaceLearned(counts, rows, numbers, soft_labels, labels, bad_rows)


class _AddedUp:
    """The counts of all files, in place of `ValueCounts`; Spark adds them up, all names at once."""

    def __init__(
        self,
        session: SparkSession,
        folder: Path,
        names: Sequence[str],
        folders: Mapping[str, Sequence[Path]],
    ) -> None:
        self._names, self._folders = names, []
        for kind, of_kind in folders.items():
            unseen = next((one for one in of_kind if not one.exists()), None)
            if unseen is not None:
                raise DataError(
                    f"{unseen}: was written by one of Spark's workers and is not here; they must "
                    "see the prepared folder under the same path as this process"
                )
            added = folder / kind
            counts = session.read.parquet(*map(_for_spark, of_kind))
            counts = counts.groupBy(_NAME, VALUE).sum(COUNT)
            counts = counts.withColumnRenamed(f"sum({COUNT})", COUNT)
            counts.write.partitionBy(_NAME).parquet(f"file://{added}")
            if not any(added.glob("*/*.parquet")):
                raise DataError(
                    f"{added}: Spark's workers did not write there; they must see the prepared "
                    "folder under the same path as this process"
                )
            self._folders.append(added)

    def tables(self, name: str) -> Iterator[pl.DataFrame]:
        """Tables of `value` and `count`; each value is in one of them."""
        for added in self._folders:
            for file in sorted((added / f"{_NAME}={self._names.index(name)}").glob("*.parquet")):
                yield pl.read_parquet(file, glob=False, hive_partitioning=False)


@dataclass
class _Write:
    source: Source
    options: PreparationOptions
    folder: Path
    assignment: Assignment
    places: Sequence[Place]
    before: np.ndarray
    new: Mapping[str, np.ndarray] | None
    preparation: str  # names it, unlike the folder, which may be that of an earlier one

    def __call__(self, number: int) -> tuple[Path, list[tuple[int, np.ndarray]]]:
        """Write a stretch's rows; where, and shards and counts of `UnknownIds` of each part."""
        log, place = self.source.log, _place_of_attempt(self.folder)
        learned = _learned(self.folder, self.preparation)
        rows = (
            RowsOfParts(chunk.frame, self.assignment.parts(chunk), chunk.position)
            for chunk in log.chunks(BadRows(self.options.on_bad_row), self.places[number])
        )
        with RowProgress("writing", log.bytes) as progress:
            before = self.before[number].tolist()
            parts, unknown = write_rows(
                place, rows, learned, self.options, progress, self.new, before
            )
        return place, [(len(parts[part]), unknown[part].counts) for part in PARTS]


@lru_cache(maxsize=1)
def _learned(folder: Path, preparation: str) -> Learned:
    """What a preparation has learned; read once in each of Spark's processes."""
    return load(folder / LEARNED_FOLDER, indexes=folder / COUNTS / INDEXES)


@dataclass
class _Join:
    folder: Path
    shard_rows: int
    # Part and number of each, and the folders of the stretches that have rows of it, in order.
    shards: Sequence[tuple[tuple[PartName, int], Sequence[Path]]]

    def __call__(self, number: int) -> ShardEntry:
        """Make a shard of the pieces that tasks wrote of it."""
        (part, shard), folders = self.shards[number]
        made = _place_of_attempt(self.folder)
        writer = PartWriter(made, part, self.shard_rows, shard * self.shard_rows)
        stem = f"{part}-{shard:05d}-"
        for place in folders:
            files = {path.stem.removeprefix(stem): path for path in place.glob(f"{stem}*.npy")}
            arrays = {name: np.load(path, mmap_mode="r") for name, path in files.items()}
            bags = []
            while f"offsets_{len(bags)}" in arrays:
                at = len(bags)
                lengths = np.diff(arrays.pop(f"offsets_{at}"))
                of_ids = (arrays.pop(f"{kind}_{at}", None) for kind in ("values", "weights"))
                bags.append(EncodedBag(lengths, *of_ids))
            writer.append(arrays, bags)
        (entry,) = writer.finish()
        for file in made.iterdir():
            os.replace(file, self.folder / file.name)
        return entry


def _for_spark(path: Path) -> str:
    """A path to read; not `as_uri`, as Spark takes %20 for these three characters."""
    return "file://" + re.sub(r"([*?\[\]{}\\])", r"\\\1", str(path))


def _place_of_attempt(folder: Path) -> Path:
    """A new folder for what a task makes."""
    place = folder / _PIECES / uuid4().hex
    place.mkdir(parents=True)
    return place
