"""Prepare a click log: `python -m stampede.data.prepare KIND FILE... --out FOLDER`.

Pass 1 learns on the training part, pass 2 writes all parts.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import polars as pl

from stampede.data.errors import DataError, exit_status
from stampede.data.learning.learned import Learned, Learner
from stampede.data.learning.vocabulary import Distinct, distinct_ids, hashed, hashes
from stampede.data.options import PreparationOptions
from stampede.data.parallel import computed_ahead
from stampede.data.prepared.manifest import BAD_ROWS, LEARNED_FOLDER, prepared_summary
from stampede.data.prepared.verify import verify
from stampede.data.prepared.writer import RowsOfParts, write_manifest, write_rows
from stampede.data.progress import RowProgress
from stampede.data.raw.log import Chunk
from stampede.data.raw.rows import BadRows
from stampede.data.schema.features import described
from stampede.data.schema.schema import Quantiles, Schema
from stampede.data.sources import TRAIN, Assignment, Kind, Source, open_source
from stampede.files import make_folder
from stampede.settings import from_key_values, keys_help

# With fewer rows, a part may be empty.
_FEWEST_ROWS = 10

_PART, _POSITION = "#part", "#position"


def prepare(source: Source, options: PreparationOptions, folder: Path) -> bool:
    """Prepare a log unless the folder exists; it appears only when it is complete.

    Returns:
        Whether the folder is new.

    Raises:
        DataError: the log cannot be used or the folder cannot be written.
    """
    return make_folder(folder, lambda unfinished: _prepare(source, options, unfinished), DataError)


def _prepare(source: Source, options: PreparationOptions, folder: Path) -> None:
    log, started = source.log, time.perf_counter()
    assignment = _assignment(source)
    bad_rows = BadRows(options.on_bad_row, folder / BAD_ROWS, f"{options.written}on_bad_row=skip")
    spool = Spool(folder / "spool", log.schema) if options.spool else None
    counted = time.perf_counter()
    learned = _learn(source, assignment, options, folder, bad_rows, spool)
    learnt = time.perf_counter()
    if spool is not None and learned.takes_hashes:
        rows = iter(spool)
    else:
        # Bad rows were reported in the first pass.
        again = log.chunks(BadRows(options.on_bad_row))
        rows = (RowsOfParts(c.frame, assignment.parts(c), c.position) for c in again)
    with RowProgress("pass 2 of 2, writing", log.bytes) as progress:
        parts = write_rows(folder, rows, learned, options, progress)
    shutil.rmtree(folder / "spool", ignore_errors=True)
    log.check_unchanged()
    seconds = {
        "counting": counted - started,
        "learning": learnt - counted,
        "writing": time.perf_counter() - learnt,
    }
    about = {**source.described(), "features": described(learned.schema), "seconds": seconds}
    write_manifest(folder, log, learned, options, parts, bad_rows, about, source.growth)


def _assignment(source: Source) -> Assignment:
    log, counts = source.log, None
    if source.split.needs_counts():
        with RowProgress("counting rows", log.bytes) as progress:
            counts = log.counts(progress.advance_to)
        log.check_rows()
        if sum(counts) < _FEWEST_ROWS:
            raise DataError(
                f"{log.files[0]}: {sum(counts)} rows are too few to divide into parts; need "
                f"{_FEWEST_ROWS} or more"
            )
    return Assignment(source.split, counts, source.test_share, source.file_parts)


def _learn(
    source: Source,
    assignment: Assignment,
    options: PreparationOptions,
    folder: Path,
    bad_rows: BadRows,
    spool: Spool | None,
) -> Learned:
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

        # In a thread, while the next rows are parsed.
        for _ in computed_ahead(learn, log.chunks(bad_rows), 1):
            pass
    if learner.rows == 0:
        log.check_rows()
        written = options.written
        raise DataError(
            f"{log.files[0]}: the training part has no row ({bad_rows.count:,} bad rows were left "
            f"out); write {written}split=random or another split, or {written}on_bad_row=error to "
            "see what is wrong with the rows"
        )
    learned = learner.save(folder / LEARNED_FOLDER)
    shutil.rmtree(folder / "counts", ignore_errors=True)
    return learned


class Spool:
    """Keeps parsed rows on disk between the two passes, so that a log is parsed once.

    A new folder with two files for each chunk; each is deleted once it has been read.
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
        """Keep some typed rows, with `distinct` as `distinct_ids` gives it."""
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
        """Store a column of numbers as Float32 where that changes none of them."""
        narrow = {name: pl.col(name).cast(pl.Float32) for name in self._numbers}
        same = frame.select(
            (column.cast(pl.Float64) == pl.col(name)).all() for name, column in narrow.items()
        )
        return frame.with_columns(column for name, column in narrow.items() if same[name].all())

    def _paths(self, number: int) -> tuple[Path, Path]:
        return self._folder / f"{number}.arrow", self._folder / f"{number}-values.arrow"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for a user's mistake."""
    parser = _parser()
    # Files may stand on either side of the options.
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
    print(f"{folder}: all files are as they were written, and hold what they should")


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
    folder = Path(given.out)
    if not prepare(source, options, folder):
        raise DataError(f"{folder}: is there already; delete it, or write another --out")
    print(prepared_summary(folder))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede prepare",
        description="Turn a raw click log into arrays that are ready to train on.\nIds and ranges "
        "are learned from the training part only.",
        epilog=_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "kind",
        nargs="?",
        metavar="KIND",
        help="criteo_kaggle, criteo_1tb, avazu, or table: any log, with --schema",
    )
    add("files", nargs="*", metavar="FILE", help="csv, tsv or parquet; .gz, .zst; or a glob")
    add("--out", metavar="FOLDER", help="new folder for the prepared data")
    add("--schema", metavar="FILE.yaml", help="what the columns of a table mean")
    add(
        "-s",
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option, see below; may be repeated",
    )
    add(
        "--split-hour",
        action="store_true",
        help="avazu: hour of the day and weekday instead of the hour as an id",
    )
    add("--verify", metavar="PREPARED", help="check the files of a prepared folder; nothing else")
    return parser


def _keys() -> str:
    lines = [
        "options, with defaults:",
        *keys_help(PreparationOptions),
        "",
        "example:",
        "  stampede prepare criteo_kaggle train.txt --out prepared \\",
        "      --set split=random --set on_bad_row=skip",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
