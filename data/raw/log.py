"""A whole raw log: its files in order, as chunks of typed rows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stampede.data.errors import DataError
from stampede.data.overlap import computed_ahead
from stampede.data.raw.bad_rows import BadRow, BadRows
from stampede.data.raw.delimited import Delimited
from stampede.data.raw.parquet import Parquet
from stampede.data.raw.rows import RawRows
from stampede.data.raw.typed import typed
from stampede.data.schema import Schema
from stampede.settings import cut

_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Chunk:
    """Some typed rows.

    Attributes:
        frame: a column for each id field and number of the schema, by name; `#label`, and where
            there are such `#weight`, `#time`, `#split` (see `typed`).
        file: number of their file.
        numbers: `[n]` int64, number of each row within its file, from 0, bad rows counted.
        position: bytes read of all files so far.
    """

    frame: pl.DataFrame
    file: int
    numbers: np.ndarray
    position: int

    def take(self, mask: np.ndarray) -> Chunk:
        """The rows where `mask` holds."""
        if mask.all():
            return self
        frame = self.frame.filter(pl.Series(mask))
        return Chunk(frame, self.file, self.numbers[mask], self.position)


_Typed = tuple[pl.DataFrame, np.ndarray, list[BadRow], Counter[str]]


class RawLog:
    """Files of one schema, read one after another.

    Args:
        schema: what their columns mean.
        files: in order; all of one format.
        split_column: a further column that is wanted as text.
        bad_values_are_missing: whether a bad number, id or time, of which an input is made, is
            taken for a missing one. Else its row is bad.
    """

    def __init__(
        self,
        schema: Schema,
        files: Sequence[Path],
        split_column: str | None = None,
        bad_values_are_missing: bool = False,
    ) -> None:
        self.schema = schema
        self.files = list(files)
        self._split_column = split_column
        self._bad_values_are_missing = bad_values_are_missing
        self._used = schema.used_columns() | ({split_column} if split_column else set())
        self._counts: list[int] | None = None
        self.bytes = sum(_size(file) for file in self.files)

    def counts(self, advanced: Callable[[int], object] = lambda _: None) -> list[int]:
        """Rows of each file, bad ones included.

        Args:
            advanced: told the number of bytes of all files read so far.
        """
        if self._counts is None:
            counts, before = [], 0
            for file in self.files:
                counts.append(
                    self._format(file).count(file, lambda at, before=before: advanced(before + at))
                )
                before += _size(file)
                advanced(before)
            self._counts = counts
        return self._counts

    def check_rows(self) -> None:
        """Refuse a log without a row; needs the counts of rows.

        Raises:
            DataError: says what its first file holds instead.
        """
        if any(self.counts()):
            return
        file = self.files[0]
        kind = self._format(file)
        if isinstance(kind, Parquet):
            raise DataError(f"{file}: holds no row; write where the click log is")
        first = "" if kind.columns else kind.first_line(file)
        if not first:
            raise DataError(f"{file}: is empty; write where the click log is")
        raise DataError(
            f"{file}: holds a header line and no row; it is {cut(repr(first))}. If that is a row, "
            "name the columns in the schema of a table, as in `columns: [label, user, item]`"
        )

    def chunks(self, bad_rows: BadRows) -> Iterator[Chunk]:
        """All rows, in order.

        Raises:
            DataError: a file cannot be used, or a row of it and `bad_rows` says so.
        """
        before = 0
        for number, file in enumerate(self.files):
            kind = self._format(file)

            def convert(piece: Any, kind: Delimited | Parquet = kind) -> tuple[RawRows, _Typed]:
                raw = kind.rows(piece, self._used)
                return raw, typed(
                    raw, self.schema, self._split_column, self._bad_values_are_missing
                )

            pieces = kind.pieces(file, self._used)
            # The parser uses all cores, but not all the time: a second piece fills the gaps.
            for raw, (frame, numbers, bad, values) in computed_ahead(convert, pieces, 2, threads=2):
                bad_rows.marks += raw.marks
                bad_rows.values += values
                bad_rows.report([*raw.bad, *bad])
                yield Chunk(frame, number, numbers, before + raw.position)
            before += _size(file)

    def _format(self, file: Path) -> Delimited | Parquet:
        return format_of(self.schema, file, self._split_column)


def format_of(schema: Schema, file: Path, split_column: str | None = None) -> Delimited | Parquet:
    """How a file of a schema is read.

    Args:
        split_column: a further column that is wanted as text.
    """
    suffixes = [suffix for suffix in file.suffixes if suffix.lower() not in _COMPRESSED]
    suffix = suffixes[-1].lower() if suffixes else ""
    if schema.format == "parquet" or (schema.format == "auto" and suffix in (".parquet", ".pq")):
        return Parquet(schema.missing)
    separator = schema.separator
    if separator == "auto":
        separator = "\t" if suffix in (".tsv", ".txt", ".tab") else ","
    numeric = schema.numeric_columns() - {split_column}
    return Delimited(separator, schema.quote, schema.columns, numeric, schema.missing)


def _size(file: Path) -> int:
    try:
        return os.path.getsize(file)
    except OSError as failure:
        raise DataError(f"{file}: {failure.strerror or failure}") from None
