"""The command `stampede prepare`: turns a click log into a prepared folder.

Pass 1 learns from the training part, pass 2 writes all parts.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import polars as pl

from stampede.data.errors import DataError, exit_status
from stampede.data.learning.learned import Learner
from stampede.data.learning.vocabulary import Distinct, distinct_ids, hashed, hashes
from stampede.data.options import PreparationOptions
from stampede.data.parallel import computed_ahead
from stampede.data.prepared.manifest import (
    BAD_ROWS,
    LEARNED_FOLDER,
    ShardEntry,
    prepared_summary,
)
from stampede.data.prepared.verify import verify
from stampede.data.prepared.writer import RowsOfParts, write_manifest, write_rows
from stampede.data.progress import RowProgress
from stampede.data.raw.log import Chunk
from stampede.data.raw.rows import BadRows
from stampede.data.schema.features import described
from stampede.data.schema.schema import Quantiles, Schema
from stampede.data.sources import TRAIN, Assignment, Kind, Source, open_source
from stampede.files import make_folder
from stampede.settings import from_key_values, keys_help, shown

# With fewer rows, a part could be empty.
_FEWEST_ROWS = 10

# Times sampled per part, and the share of newer training rows that gives advice.
_MOST_TIMES, _MOST_NEWER = 100_000, 0.1

_PART, _POSITION = "#part", "#position"

_EXAMPLE = """example:
  stampede prepare criteo_kaggle train.txt --out prepared \\
      --set split=random --set on_bad_row=skip"""


def prepare(source: Source, options: PreparationOptions, folder: Path) -> bool:
    """Prepare a log unless the folder exists. The folder appears only when it is complete.

    Returns:
        Whether the folder is new.

    Raises:
        DataError: the log cannot be used, or the folder cannot be written.
    """

    def fill(unfinished: Path) -> None:
        try:
            _prepare(source, options, unfinished, folder)
        except DataError:
            # A file that is still being written looks damaged.
            source.log.check_unchanged()
            raise

    return make_folder(folder, fill, DataError)


def _prepare(source: Source, options: PreparationOptions, folder: Path, place: Path) -> None:
    log, started = source.log, time.perf_counter()
    assignment = _assignment(source)
    remedy = f"{options.written}on_bad_row=skip to leave such rows out"
    bad_rows = BadRows(options.on_bad_row, folder / BAD_ROWS, remedy)
    spool = Spool(folder / "spool", log.schema) if options.spool else None
    counted = time.perf_counter()
    learner = _learn(source, assignment, options, folder, bad_rows, spool)
    learnt = time.perf_counter()
    learned = learner.save(folder / LEARNED_FOLDER)
    shutil.rmtree(folder / "counts", ignore_errors=True)
    saved = time.perf_counter()
    if spool is not None and learned.takes_hashes:
        rows = iter(spool)
    else:
        # Pass 1 has reported the bad rows.
        again = log.chunks(BadRows(options.on_bad_row))
        rows = (RowsOfParts(c.frame, assignment.parts(c), c.position) for c in again)
    with RowProgress("pass 2 of 2, writing", log.bytes) as progress:
        parts = write_rows(folder, rows, learned, options, progress)
    shutil.rmtree(folder / "spool", ignore_errors=True)
    log.check_unchanged()
    seconds = {
        "counting": counted - started,
        "learning": learnt - counted,
        "vocabularies": saved - learnt,
        "writing": time.perf_counter() - saved,
    }
    about = {**source.described(), "features": described(learned.schema), "seconds": seconds}
    if options.split == "sequential" and log.schema.time is not None:
        advice = _advice_on_order(folder, parts, source, options.written)
        about |= {"advice": advice} if advice else {}
    write_manifest(folder, log, learned, options, parts, bad_rows, about, source.growth, place)


def _advice_on_order(
    folder: Path, parts: Mapping[str, Sequence[ShardEntry]], source: Source, written: str
) -> str:
    """Advice if a sequential split tests on rows that are not the newest, else empty."""
    train, test = (_some_times(folder, parts.get(part, ())) for part in ("train", "test"))
    newer = (train > np.median(test)).mean() if len(test) else 0.0
    if newer < _MOST_NEWER:
        return ""
    time = source.log.schema.time.column
    keys = ("split=by_column", f"split_column={time}", "test_from=VALUE")
    return (
        f"{newer:.0%} of the training rows are newer than half of the test rows, but "
        "split=sequential assumes that the last rows of the log are the newest: sort the log by "
        f"{shown(time)}, or write " + " ".join(f"{written}{shlex.quote(key)}" for key in keys)
    )


def _some_times(folder: Path, shards: Sequence[ShardEntry]) -> np.ndarray:
    """The times of evenly spread rows of a part."""
    step = 1 + sum(shard.rows for shard in shards) // _MOST_TIMES
    files = [folder / shard.files["time"].name for shard in shards]
    times = [np.load(file, mmap_mode="r")[::step] for file in files]
    return np.concatenate([np.empty(0, np.int64), *times])


def _assignment(source: Source) -> Assignment:
    log, counts = source.log, None
    if source.split.needs_counts():
        counts = log.counts()
        log.check_rows()
        if sum(counts) < _FEWEST_ROWS:
            raise DataError(
                f"{log.files[0]}: too few rows to divide into parts ({sum(counts)}); give at "
                f"least {_FEWEST_ROWS}"
            )
    return Assignment(source, counts)


def _learn(
    source: Source,
    assignment: Assignment,
    options: PreparationOptions,
    folder: Path,
    bad_rows: BadRows,
    spool: Spool | None,
) -> Learner:
    log, budget = source.log, int(options.counts_gb * 1e9)
    learner = Learner(log.schema, budget, folder / "counts", source.growth)
    with RowProgress("pass 1 of 2, learning", log.bytes) as progress:

        def learn(chunk: Chunk) -> None:
            parts = assignment.parts(chunk)
            distinct = distinct_ids(chunk.frame, log.schema)
            frame = chunk.frame.drop(distinct)
            train = parts == TRAIN
            learner.add(
                frame if train.all() else frame.filter(pl.Series(train)),
                {name: column.take(train) for name, column in distinct.items()},
            )
            if spool is not None:
                spool.append(RowsOfParts(frame, parts, chunk.position, distinct))
            progress.advance_to(chunk.position, len(chunk.numbers))

        # In a thread, while this one parses the next rows.
        for _ in computed_ahead(learn, log.chunks(bad_rows), 1):
            pass
    if learner.rows == 0:
        log.check_rows()
        written = options.written
        raise DataError(
            f"{log.files[0]}: the training part has no rows (bad rows left out: "
            f"{bad_rows.count:,}); write {written}split=random or another split, or "
            f"{written}on_bad_row=error to see what is wrong with the rows"
        )
    return learner


class Spool:
    """Keeps parsed rows on disk between the two passes, so that a log is parsed once.

    Each chunk is two files of a new folder, deleted when read.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._numbers = [
            *schema.numbers,
            *(name for name, field in schema.ids.items() if isinstance(field, Quantiles)),
        ]
        self._count = 0
        folder.mkdir()

    def append(self, rows: RowsOfParts) -> None:
        """Store typed rows, with the columns of `distinct_ids` in `distinct`."""
        kept = self._narrowed(hashed(rows.frame, self._schema)).with_columns(
            *(pl.Series(name, column.codes) for name, column in rows.distinct.items()),
            pl.Series(_PART, rows.parts),
        )
        values = (
            hashes(column.values).alias(name).implode() for name, column in rows.distinct.items()
        )
        once = pl.DataFrame([pl.Series(_POSITION, [rows.position]), *values])
        for path, frame in zip(self._paths(self._count), (kept, once), strict=True):
            frame.write_ipc(path, compression="uncompressed")
        self._count += 1

    def __iter__(self) -> Iterator[RowsOfParts]:
        for number in range(self._count):
            paths = self._paths(number)
            frame, once = map(pl.read_ipc, paths)
            for path in paths:
                path.unlink()
            if len(frame):
                distinct = {
                    name: Distinct(once[name][0], frame[name].to_numpy())
                    for name in once.columns[1:]
                }
                rows = frame.drop(_PART, *distinct).with_columns(
                    pl.col(self._numbers).cast(pl.Float64)
                )
                yield RowsOfParts(rows, frame[_PART].to_numpy(), once[_POSITION][0], distinct)

    def _narrowed(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Store numbers as Float32 if that is exact for the whole column."""
        narrow = {name: pl.col(name).cast(pl.Float32) for name in self._numbers}
        same = frame.select(
            (column.cast(pl.Float64) == pl.col(name)).all() for name, column in narrow.items()
        )
        return frame.with_columns(column for name, column in narrow.items() if same[name].all())

    def _paths(self, number: int) -> tuple[Path, Path]:
        return self._folder / f"{number}.arrow", self._folder / f"{number}-values.arrow"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    # Intermixed: files may come before and after the options.
    given = parser.parse_intermixed_args(arguments)
    if given.verify is not None:
        return exit_status(lambda: _verify(Path(given.verify)))
    if given.kind is None or not given.files or given.out is None:
        parser.error("write KIND, FILE... and --out FOLDER, or --verify FOLDER")
    if given.kind not in get_args(Kind):
        parser.error(f"KIND: found {given.kind!r}; write one of {', '.join(get_args(Kind))}")
    return exit_status(lambda: _run(given))


def _verify(folder: Path) -> None:
    verify(folder)
    print(f"{folder}: all files are unchanged and valid")


def _run(given: argparse.Namespace) -> None:
    options = from_key_values(given.set, PreparationOptions, "--set")
    source = open_source(
        given.kind,
        given.files,
        options,
        schema=given.schema or "",
        split_hour=given.split_hour or None,
        features=options.features,
        growth=options,
        period_before=options.period_before,
    )
    if not prepare(source, options, Path(given.out)):
        raise DataError(f"{given.out}: already exists; delete it, or choose another --out")
    print(prepared_summary(Path(given.out)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede prepare",
        description="Turn a raw click log into arrays to train on.\nIds and ranges are learned "
        "from the training part only.",
        epilog="\n".join(["options, with defaults:", *keys_help(PreparationOptions), "", _EXAMPLE]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    kinds = "criteo_kaggle, criteo_1tb, avazu, or table: any log, with --schema"
    add("kind", nargs="?", metavar="KIND", help=kinds)
    add("files", nargs="*", metavar="FILE", help="csv, tsv or parquet; .gz, .zst; or a glob")
    add("--out", metavar="FOLDER", help="new folder for the prepared data")
    add("--schema", metavar="FILE.yaml", help="what the columns of a table mean")
    option = "an option, see below; may be repeated"
    add("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help=option)
    hour = "avazu: hour of the day and weekday as ids instead of the hour"
    add("--split-hour", action="store_true", help=hour)
    add("--verify", metavar="PREPARED", help="only check the files of a prepared folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
