"""The Parquet file with scores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from stampede.engine.errors import RunFolderError
from stampede.engine.metrics import probability
from stampede.files import hidden, new_file, remove

_FILE = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())


@contextmanager
def new_output(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a path to write to; it is renamed to `path` if the block succeeds, else removed.

    Raises:
        RunFolderError: the file already exists, or cannot be written.
    """
    try:
        if path.is_dir():
            raise RunFolderError(f"{path}: is a folder; write the name of a file")
        if path.exists() and not overwrite:
            raise RunFolderError(f"{path}: already exists; write --overwrite, or another name")
        with new_file(path) as unfinished:
            yield unfinished
    except OSError as failure:
        raise RunFolderError(
            f"{path}: cannot be written ({failure.strerror or failure}); make room, or write "
            "another file"
        ) from None


@contextmanager
def score_file(path: Path, overwrite: bool) -> Iterator[ScoreFile]:
    """Open a file of scores; see `new_output`.

    Raises:
        RunFolderError: the file already exists, is not named .parquet, or cannot be written.
    """
    if path.suffix != ".parquet":
        raise RunFolderError(f"{path}: scores are written as Parquet; write a NAME.parquet")
    bad_rows = path.with_suffix(".bad_rows.jsonl")
    try:
        with new_output(path, overwrite) as unfinished:
            with closing(ScoreFile(unfinished, bad_rows)) as file:
                # Left by a process that was killed.
                remove(file.unfinished_bad_rows)
                yield file
            # The bad rows of an output that was replaced.
            bad_rows.unlink(missing_ok=True)
            if file.unfinished_bad_rows.exists():
                os.replace(file.unfinished_bad_rows, bad_rows)
    finally:
        remove(hidden(bad_rows, "tmp"))


class ScoreFile:
    """A Parquet file that grows row group by row group.

    Its columns: `file`, for rows of files; `row`, int64, see `Piece.rows`; `score`, double, the
    probability of a click; `label` and `weight`, float, if present. The score is a double because
    floats cannot tell large logits apart.

    Args:
        path: where it is written.
        bad_rows: file for rows left out.

    Attributes:
        unfinished_bad_rows: becomes `bad_rows` at the end.
        rows: written so far.
    """

    def __init__(self, path: Path, bad_rows: Path) -> None:
        self._path = path
        self._writer: pyarrow.parquet.ParquetWriter | None = None
        self.bad_rows = bad_rows
        self.unfinished_bad_rows = hidden(bad_rows, "tmp")
        self.rows = 0

    def begin(
        self, files: tuple[str, ...], has_label: bool, has_weight: bool, about: Mapping[str, str]
    ) -> None:
        """Open the file.

        Args:
            files: names of the rows' files; empty: no such column.
            has_label, has_weight: whether to write these columns.
            about: the file's metadata.
        """
        self._files = pyarrow.array(list(files), pyarrow.string())
        columns = [("file", _FILE)] if files else []
        columns += [("row", pyarrow.int64()), ("score", pyarrow.float64())]
        columns += [("label", pyarrow.float32())] * has_label
        columns += [("weight", pyarrow.float32())] * has_weight
        self._schema = pyarrow.schema(columns, metadata=dict(about))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pyarrow.parquet.ParquetWriter(self._path, self._schema, compression="zstd")

    def append(
        self, file: int, rows: np.ndarray, logits: np.ndarray, label: np.ndarray, weight: np.ndarray
    ) -> None:
        """Write some rows, `[n]` each, of one file."""
        columns = {"row": rows, "score": probability(logits), "label": label, "weight": weight}
        if len(self._files):
            indices = pyarrow.array(np.full(len(rows), file, dtype=np.int32))
            columns["file"] = pyarrow.DictionaryArray.from_arrays(indices, self._files)
        arrays = [pyarrow.array(columns[name]) for name in self._schema.names]
        self._writer.write_table(pyarrow.Table.from_arrays(arrays, schema=self._schema))
        self.rows += len(rows)

    def close(self) -> None:
        """Write what is left in memory."""
        if self._writer is not None:
            self._writer.close()
