"""New data with vocabularies and ranges that were learned before."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from stampede.data.errors import DataError
from stampede.data.learning.learned import load
from stampede.data.prepared.manifest import read_manifest
from stampede.data.prepared.verify import check_content
from stampede.data.progress import RowProgress
from stampede.data.raw import BadRows, RawLog, expand
from stampede.data.splits import TEST
from stampede.data.spool import Spooled
from stampede.data.writing import (
    BAD_ROWS,
    LEARNED_FOLDER,
    WritingOptions,
    write_manifest,
    write_rows,
)
from stampede.files import make_folder


def apply_learned(
    prepared: Path, files: str | Sequence[str], options: WritingOptions, folder: Path
) -> bool:
    """Prepare files as those that a prepared folder was made of; all rows are of the test part.

    Args:
        prepared: the folder that something was learned for.
        files: with the same columns.
        options: how to write.
        folder: where to; appears when it is whole.

    Returns:
        Whether it was not there yet.

    Raises:
        DataError: nothing was learned or it has changed since, a file cannot be used, or the folder
            cannot be written.
    """
    manifest = read_manifest(prepared)
    if not (prepared / LEARNED_FOLDER).is_dir():
        raise DataError(f"{prepared}: nothing was learned for it; prepare a raw log")
    check_content(prepared, manifest.learned)
    learned = load(prepared / LEARNED_FOLDER, fields=manifest.fields)
    log = RawLog(learned.schema, expand(files))

    def make(unfinished: Path) -> None:
        shutil.copytree(prepared / LEARNED_FOLDER, unfinished / LEARNED_FOLDER)
        option = f"{options.written}on_bad_row=skip"
        bad_rows = BadRows(options.on_bad_row, unfinished / BAD_ROWS, option)
        with RowProgress("writing", log.bytes) as progress:
            parts = write_rows(unfinished, _as_test(log, bad_rows), learned, options, progress)
        source = {"learned_from": str(prepared), "schema": learned.schema.model_dump(mode="json")}
        write_manifest(unfinished, log, learned, options, parts, bad_rows, source)

    return make_folder(folder, make, DataError)


def _as_test(log: RawLog, bad_rows: BadRows) -> Iterator[Spooled]:
    for chunk in log.chunks(bad_rows):
        parts = np.full(len(chunk.numbers), TEST, dtype=np.int8)
        yield Spooled(chunk.frame, parts, chunk.position)
