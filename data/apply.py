"""The command `stampede apply`: prepares new files with the ids and ranges of prepared data."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stampede import stores
from stampede.data.errors import DataError
from stampede.data.exit_status import exit_status
from stampede.data.learning.learned import load
from stampede.data.options import WritingOptions
from stampede.data.prepared.manifest import (
    BAD_ROWS,
    LEARNED_FOLDER,
    TEST,
    prepared_summary,
    read_manifest,
)
from stampede.data.prepared.verify import check_content
from stampede.data.prepared.writer import RowsOfParts, shares_of, write_manifest, write_rows
from stampede.data.progress import RowProgress
from stampede.data.raw.files import expand
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.files import make_folder
from stampede.settings import from_key_values, keys_help


def apply_learned(
    prepared: Path, files: str | Sequence[str], options: WritingOptions, folder: Path
) -> bool:
    """Prepare new files with the vocabularies and ranges of a prepared folder.

    All rows go to the test part of a new folder, which appears only when it is complete.

    Returns:
        Whether the folder is new.

    Raises:
        DataError: `prepared` has no vocabularies or has changed, a file cannot be used, or the
            folder cannot be written.
    """
    manifest = read_manifest(prepared)
    if not (prepared / LEARNED_FOLDER).is_dir():
        raise DataError(f"{prepared}: has no vocabularies; give a folder made by stampede prepare")
    check_content(prepared, manifest.learned)
    learned = load(prepared / LEARNED_FOLDER)
    log = RawLog(learned.schema, expand(files))

    def make(unfinished: Path) -> None:
        shutil.copytree(prepared / LEARNED_FOLDER, unfinished / LEARNED_FOLDER)
        remedy = f"{options.written}on_bad_row=skip to leave such rows out"
        bad_rows = BadRows(options.on_bad_row, unfinished / BAD_ROWS, remedy)
        rows = (
            RowsOfParts(chunk.frame, np.full(len(chunk.numbers), TEST, np.int8), chunk.position)
            for chunk in log.chunks(bad_rows)
        )
        with RowProgress("writing", log.bytes) as progress:
            parts, unknown = write_rows(unfinished, rows, learned, options, progress)
        source = {
            "learned_from": str(prepared),
            "schema": learned.schema.model_dump(mode="json"),
            "unknown_ids": shares_of(unknown, parts),
        }
        write_manifest(unfinished, log, learned, options, parts, bad_rows, source, place=folder)

    return make_folder(folder, make, DataError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede apply",
        description="Turn new files into arrays with the ids and ranges of a prepared folder.\n"
        "Their rows are the test part of the result.",
        epilog="\n".join(["options, with defaults:", *keys_help(WritingOptions)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("prepared", metavar="PREPARED", help="a folder made by stampede prepare")
    add("files", nargs="+", metavar="FILE", help="with the same columns; .gz, .zst; or a glob")
    add("--out", required=True, metavar="FOLDER", help="new folder for the result")
    add("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="see below")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    given = parser.parse_intermixed_args(arguments)

    def run() -> None:
        prepared = stores.fetched(given.prepared)
        options = from_key_values(given.set, WritingOptions, "--set")
        with stores.outgoing(given.out, overwrite=False) as folder:
            if not apply_learned(prepared, given.files, options, folder):
                raise DataError(f"{given.out}: already exists; delete it, or choose another --out")
        print(prepared_summary(folder, given.out))

    return exit_status(run)
