"""Rows of a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow
import pyarrow.parquet

from stampede.data.errors import DataError
from stampede.data.raw.rows import RawRows, without_marks
from stampede.settings import cut

_BATCH_ROWS = 1 << 18


# Some rows of a file, the number of the first one, and the bytes read so far.
Piece = tuple[Path, pyarrow.RecordBatch, int, int]


@dataclass(frozen=True)
class Parquet:
    """Reads Parquet files.

    Attributes:
        missing: texts that mean a missing value, besides null.
    """

    missing: Sequence[str]

    def count(self, path: Path) -> Iterator[tuple[int, int]]:
        """Rows and bytes of a file."""
        with open_parquet(path) as file:
            yield file.metadata.num_rows, os.path.getsize(path)

    def names(self, path: Path, _: str) -> list[str]:
        """Names of a file's columns."""
        with open_parquet(path) as file:
            return file.schema_arrow.names

    def pieces(self, path: Path, used: set[str]) -> Iterator[Piece]:
        """A file in pieces that can be converted independently.

        Raises:
            DataError: the file cannot be read or lacks a used column.
        """
        with open_parquet(path) as file:
            size = os.path.getsize(path)
            total = max(file.metadata.num_rows, 1)
            absent = sorted(used - set(file.schema_arrow.names))
            if absent:
                names = cut(", ".join(file.schema_arrow.names))
                raise DataError(
                    f"{path}: no column {absent[0]!r}; its columns are {names}; rename one, or "
                    "correct the schema"
                )
            done = 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=sorted(used)):
                first, done = done, done + len(batch)
                yield path, batch, first, size * done // total

    def rows(self, piece: Piece, used: set[str]) -> RawRows:
        """Rows of a piece, with the columns as they are stored."""
        path, batch, first, position = piece
        numbers = np.arange(first, first + len(batch))
        frame = pl.from_arrow(batch)
        frame = frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
        frame, marks = without_marks(frame, self.missing)
        return RawRows(frame, str(path), numbers + 1, numbers, None, position, marks=marks)


@contextmanager
def open_parquet(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Open a Parquet file.

    Raises:
        DataError: it is absent or damaged, as is found here or while it is read.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as failure:
        raise DataError(
            f"{path}: cannot be read as Parquet ({failure}); copy or download it again"
        ) from None
