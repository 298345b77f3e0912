"""The Parquet file with scores."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from stampede.engine.console import readable_bytes
from stampede.engine.errors import RunFolderError
from stampede.engine.metrics import probability

# Bytes that a file system takes.
_LONGEST_NAME = 255

_FILE = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())


class ScoreFile:
    """A Parquet file that grows row group by row group and has its name when it is whole.

    Its columns: `file`, where rows are of files; `row`, int64, see `Piece.rows`; `score`, double,
    the probability of a click; `label` and `weight`, float, where these are there. The score is a
    double because a float of it cannot tell large logits apart.

    To be used as a context; what is unfinished at its end is removed, and an OSError becomes a
    sentence.

    Args:
        path: the file.
        overwrite: whether an existing file is replaced.

    Attributes:
        unfinished_bad_rows: for rows left out; at the end it becomes `bad_rows`.
        bad_rows: `<stem>.bad_rows.jsonl`.
        rows: written so far.

    Raises:
        RunFolderError: the file is there already, is no Parquet file, or cannot be written.
    """

    def __init__(self, path: Path, overwrite: bool) -> None:
        if path.suffix != ".parquet":
            raise RunFolderError(f"{path}: scores are written as Parquet; write a NAME.parquet")
        self.path = path
        self.bad_rows = path.with_suffix(".bad_rows.jsonl")
        self._unfinished = path.with_name(f".{path.name}.unfinished")
        self.unfinished_bad_rows = path.with_name(f".{self.bad_rows.name}.unfinished")
        beyond = len(os.fsencode(self.unfinished_bad_rows.name)) - _LONGEST_NAME
        if beyond > 0:
            raise RunFolderError(
                f"{path}: the name is too long; write one that is {beyond} characters shorter"
            )
        try:
            is_folder, is_there = path.is_dir(), path.exists()
        except OSError as failure:
            raise self._cannot_write(failure) from None
        if is_folder:
            raise RunFolderError(f"{path}: is a folder; write the name of a file")
        if is_there and not overwrite:
            raise RunFolderError(f"{path}: is there already; write --overwrite, or another name")
        self._writer: pyarrow.parquet.ParquetWriter | None = None
        self.rows = 0

    def __enter__(self) -> ScoreFile:
        return self

    def __exit__(self, kind: object, failure: BaseException | None, _: object) -> None:
        try:
            if failure is None:
                self._finish()
        except OSError as late:
            failure = late
        finally:
            self._remove()
        if isinstance(failure, OSError):
            raise self._cannot_write(failure) from None

    def begin(
        self,
        files: tuple[str, ...],
        has_label: bool,
        has_weight: bool,
        about: Mapping[str, str],
    ) -> None:
        """Open the file.

        Args:
            files: names of the files that rows are of; none: there is no such column.
            has_label, has_weight: which columns there are.
            about: further texts, kept as the file's metadata.
        """
        self._files = pyarrow.array(list(files), pyarrow.string())
        columns = [("file", _FILE)] if files else []
        columns += [("row", pyarrow.int64()), ("score", pyarrow.float64())]
        columns += [("label", pyarrow.float32())] * has_label
        columns += [("weight", pyarrow.float32())] * has_weight
        self._schema = pyarrow.schema(columns, metadata=dict(about))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._remove()
        self._writer = pyarrow.parquet.ParquetWriter(
            self._unfinished, self._schema, compression="zstd"
        )

    def append(
        self,
        file: int,
        rows: np.ndarray,
        logits: np.ndarray,
        label: np.ndarray,
        weight: np.ndarray,
    ) -> None:
        """Write some rows, `[n]` each, of one file."""
        score = probability(logits)
        columns = {"row": rows, "score": score, "label": label, "weight": weight}
        if len(self._files):
            indices = pyarrow.array(np.full(len(rows), file, dtype=np.int32))
            columns["file"] = pyarrow.DictionaryArray.from_arrays(indices, self._files)
        arrays = [pyarrow.array(columns[name]) for name in self._schema.names]
        self._writer.write_table(pyarrow.Table.from_arrays(arrays, schema=self._schema))
        self.rows += len(rows)

    def _finish(self) -> None:
        self._writer.close()
        # Those of an output that is replaced are not of this one.
        self.bad_rows.unlink(missing_ok=True)
        if self.unfinished_bad_rows.exists():
            os.replace(self.unfinished_bad_rows, self.bad_rows)
        os.replace(self._unfinished, self.path)

    def _remove(self) -> None:
        if self._writer is not None and self._writer.is_open:
            # What it cannot write is removed now.
            with contextlib.suppress(OSError):
                self._writer.close()
        for path in (self._unfinished, self.unfinished_bad_rows):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _cannot_write(self, failure: OSError) -> RunFolderError:
        free = ""
        if os.path.isdir(self.path.parent):
            free = f", {readable_bytes(shutil.disk_usage(self.path.parent).free)} are free there"
        return RunFolderError(
            f"{self.path}: cannot be written ({failure.strerror or failure}){free}; make room, or "
            "write another file"
        )
