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
import pyarrow

from stampede import stores
from stampede.data.errors import DataError, exit_status
from stampede.data.learning.learned import Learner, rows_of_new_ids
from stampede.data.learning.vocabulary import Distinct, distinct_ids
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
from stampede.data.raw.log import Chunk, RawLog, labels_of
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Quantiles, Schema, described
from stampede.data.sources import TRAIN, Kind, Source, open_source
from stampede.data.split import Assignment
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
    log, times = source.log, [time.perf_counter()]

    def clock() -> None:
        times.append(time.perf_counter())

    counts = None
    if source.split.needs_counts():
        counts = log.counts()
        log.check_rows()
        if sum(counts) < _FEWEST_ROWS:
            raise DataError(
                f"{log.files[0]}: too few rows to divide into parts ({sum(counts)}); give at "
                f"least {_FEWEST_ROWS}"
            )
    assignment = Assignment(source, counts)
    clock()
    remedy = f"{options.written}on_bad_row=skip to leave such rows out"
    bad_rows = BadRows(options.on_bad_row, folder / BAD_ROWS, remedy)
    spool = Spool(folder / "spool", log.schema) if options.spool else None
    learner = Learner(log.schema, int(options.counts_gb * 1e9), folder / "counts", source.growth)
    _learn(learner, log, assignment, bad_rows, spool)
    if learner.rows == 0:
        log.check_rows()
        written = options.written
        raise DataError(
            f"{log.files[0]}: the training part has no rows (bad rows left out: "
            f"{bad_rows.count:,}); write {written}split=random or another split, or "
            f"{written}on_bad_row=error to see what is wrong with the rows"
        )
    clock()
    learned = learner.save(folder / LEARNED_FOLDER)
    shutil.rmtree(folder / "counts", ignore_errors=True)
    clock()
    rows = spool
    if rows is None:
        # Pass 1 has reported the bad rows.
        again = log.chunks(BadRows(options.on_bad_row))
        rows = (RowsOfParts(c.frame, assignment.parts(c), c.position) for c in again)
    new = None if source.growth is None else rows_of_new_ids(folder / LEARNED_FOLDER)
    with RowProgress("pass 2 of 2, writing", log.bytes) as progress:
        parts, unknown = write_rows(folder, rows, learned, options, progress, new)
    if options.split == "by_column":
        _check_named_parts(log, options, parts)
    shutil.rmtree(folder / "spool", ignore_errors=True)
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
    about |= {"notes": learner.notes, "unknown_ids": unknown}
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


def _learn(
    learner: Learner,
    log: RawLog,
    assignment: Assignment,
    bad_rows: BadRows,
    spool: Spool | None,
) -> None:
    """Pass 1."""
    with RowProgress("pass 1 of 2, learning", log.bytes) as progress:

        def learn(chunk: Chunk) -> None:
            parts = assignment.parts(chunk)
            labels = labels_of(chunk.frame, log.schema.goals)
            learner.soft_labels |= bool(((labels > 0) & (labels < 1)).any())
            distinct = distinct_ids(chunk.frame, log.schema)
            frame = chunk.frame.drop(distinct)
            train = parts == TRAIN
            of_train = {n: Distinct(ids, codes[train]) for n, (ids, codes) in distinct.items()}
            learner.add(frame.filter(pl.Series(train)), of_train)
            if spool is not None:
                spool.append(RowsOfParts(frame, parts, chunk.position, distinct))
            progress.advance_to(chunk.position, len(chunk.numbers))

        # In a thread, while this one parses the next rows.
        for _ in computed_ahead(learn, log.chunks(bad_rows), 1):
            pass


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
        # Float32 where that is exact for the whole column.
        numbers = [pl.col(name) for name in self._numbers]
        exact = rows.frame.select((n.cast(pl.Float32).cast(pl.Float64) == n).all() for n in numbers)
        narrow = [name for name in self._numbers if exact[name].item()]
        frame = rows.frame.with_columns(pl.col(narrow).cast(pl.Float32))
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
    add("--schema", default="", metavar="FILE.yaml", help="what the columns of a table mean")
    option = "an option, see below; may be repeated"
    add("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help=option)
    hour = "avazu: hour of the day and weekday as ids instead of the hour"
    add("--split-hour", action="store_true", help=hour)
    add("--verify", metavar="PREPARED", help="only check the files of a prepared folder")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    # Intermixed: files may come before and after the options.
    given = parser.parse_intermixed_args(arguments)
    if given.verify is None:
        if given.kind is None or not given.files or given.out is None:
            parser.error("write KIND, FILE... and --out FOLDER, or --verify FOLDER")
        if given.kind not in get_args(Kind):
            parser.error(f"KIND: found {given.kind!r}; write one of {', '.join(get_args(Kind))}")

    def run() -> None:
        if given.verify is not None:
            verify(stores.fetched(given.verify))
            print(f"{given.verify}: all files are unchanged and valid")
            return
        options = from_key_values(given.set, PreparationOptions, "--set")
        source = open_source(
            given.kind,
            given.files,
            options,
            schema=given.schema,
            split_hour=given.split_hour or None,
            features=options.features,
            growth=options,
            period_before=options.period_before,
        )
        with stores.outgoing(given.out, overwrite=False) as out:
            if not prepare(source, options, out):
                raise DataError(f"{given.out}: already exists; delete it, or choose another --out")
        print(prepared_summary(out))

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
