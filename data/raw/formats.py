"""Rows of a CSV or TSV file, as text, and of a Parquet file."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from stampede.data.errors import DataError
from stampede.data.raw.files import Block, count_bytes, read_blocks
from stampede.data.raw.rows import BadRow, RawRows, without_marks
from stampede.settings import cut, shown

_REMEDY = (
    "names of columns, `separator`, or, if line 1 is a row and not a header, `columns: [label, "
    "user, item]`"
)


# Some lines of a file, and the names of its columns.
_Lines = tuple[Path, Block, list[str]]


@dataclass(frozen=True)
class Delimited:
    """The form of a delimited file."""

    separator: str  # one character between columns
    quote: str  # one character around cells that hold separators; empty: none
    columns: Sequence[str]  # their names, where the file has no header line
    numeric: Set[str]  # columns whose cells are numbers
    missing: Sequence[str]  # texts that mean that a value is missing

    def count(self, path: Path) -> Iterator[tuple[int, int]]:
        """Rows counted and bytes read so far; the last pair is that of the whole file."""
        rows = 0
        yield rows, 0
        for block in read_blocks(path):
            is_header = block.first_line == 1 and not self.columns
            rows += block.lines - is_header
            yield rows, block.position

    def names(self, path: Path, optional: str) -> list[str]:
        """Names of a file's columns; without a header, line 1 decides whether `optional` is one."""
        first = next(read_blocks(path), None)
        if not self.columns:
            return [] if first is None else self._header(path, first)[0]
        without = [name for name in self.columns if name != optional]
        line = b"" if first is None else first.data.partition(b"\n")[0].rstrip(b"\r")
        cells = self._cells(line.decode("utf-8", "replace"))
        return without if len(cells) == len(without) else list(self.columns)

    def pieces(self, path: Path, used: set[str]) -> Iterator[_Lines]:
        """A file in pieces that can be parsed independently.

        Raises:
            DataError: the file cannot be read or lacks a used column.
        """
        columns = list(self.columns)
        with closing(read_blocks(path)) as blocks:
            for block in blocks:
                if not columns:
                    columns, block = self._header(path, block)
                absent = sorted(used - set(columns))
                if absent:
                    raise DataError(
                        f"{path}: no column {absent[0]!r}; its header line has "
                        f"{cut(', '.join(columns))}; correct the schema: {_REMEDY}"
                    )
                yield path, block, columns

    def rows(self, piece: _Lines, used: set[str]) -> RawRows:
        """Rows of a piece, with the used columns; null is missing.

        Columns are String; if every cell of the numeric ones is a number, these are Float64. Raises
        a `DataError` if a cell spans several lines.
        """
        path, block, columns = piece
        lines = np.arange(block.first_line, block.first_line + block.lines)
        text, bad = block.data, []
        frame = self._frame(text, columns, used, block.lines)
        if frame is None:
            bad = self._bad_lines(path, block, len(columns))
            wrong = {row.line - block.first_line for row in bad}
            kept = [i for i in range(block.lines) if i not in wrong]
            every = text.split(b"\n")
            text = b"".join(every[i] + b"\n" for i in kept)
            lines = lines[kept]
            frame = self._frame(text, columns, used, len(kept)) if bad else None
        if frame is None:
            raise DataError(
                f"{path}: cannot be parsed from line {block.first_line} on; quoted cells cannot "
                "contain line ends; remove them"
            )
        frame, marks = without_marks(frame, self.missing)
        numbers = lines - 1 - (not self.columns)
        return RawRows(frame, str(path), lines, numbers, text, block.position, bad, marks)

    def _header(self, path: Path, block: Block) -> tuple[list[str], Block]:
        line, _, rest = block.data.partition(b"\n")
        try:
            columns = self._cells(line.rstrip(b"\r").decode("utf-8"))
        except UnicodeDecodeError:
            raise DataError(
                f"{path}: line 1: the header is not UTF-8 text; save the file as UTF-8"
            ) from None
        twice = [name for name, count in Counter(columns).items() if count > 1]
        if twice:
            raise DataError(
                f"{path}: line 1: column {shown(twice[0])} appears twice in the header; give the "
                f"columns different names, or correct the schema: {_REMEDY}"
            )
        return columns, Block(rest, block.first_line + 1, block.lines - 1, block.position)

    def _frame(
        self, text: bytes, columns: list[str], used: set[str], lines: int
    ) -> pl.DataFrame | None:
        """The used columns; None if any line is bad."""
        if not lines:
            return pl.DataFrame(schema=dict.fromkeys(sorted(used), pl.String))
        has_quoted_blanks = "" in self.missing and self.quote and (self.quote * 2).encode() in text
        for numeric in (self.numeric, ()) if b"\0" not in text else ():
            parsed = pl.scan_csv(
                text,
                has_header=False,
                schema={name: pl.Float64 if name in numeric else pl.String for name in columns},
                separator=self.separator,
                quote_char=self.quote or None,
                # Unquoted empty cells are null anyway; listing "" takes a fifth more time.
                null_values=[""] if has_quoted_blanks else None,
                missing_utf8_is_empty_string="" not in self.missing,
            )
            with suppress(pl.exceptions.PolarsError):
                frame = parsed.collect()
                # As text, other spellings than those that mean missing are refused.
                if any(frame[name].is_nan().any() for name in numeric if name in frame.columns):
                    continue
                # The parser silently fills short lines with nulls.
                if len(frame) == lines and self._columns_agree(text, len(columns), lines):
                    # It returns many small chunks, which would slow all later steps.
                    return frame.select(sorted(used)).rechunk()
        return None

    def _columns_agree(self, text: bytes, columns: int, lines: int) -> bool:
        """Whether no line is short; the parser has refused long ones."""
        if not self.quote or self.quote.encode() not in text:
            return count_bytes(text, ord(self.separator)) == (columns - 1) * lines
        names = [str(i) for i in range(columns)]
        options = pyarrow.csv.ParseOptions(
            delimiter=self.separator, quote_char=self.quote, ignore_empty_lines=False
        )
        try:
            pyarrow.csv.read_csv(
                pyarrow.py_buffer(text),
                pyarrow.csv.ReadOptions(column_names=names),
                options,
                pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.binary())),
            )
        except pyarrow.ArrowInvalid:
            return False
        return True

    def _bad_lines(self, path: Path, block: Block, columns: int) -> list[BadRow]:
        """Lines that are not UTF-8 or have a wrong number of columns, found line by line."""
        bad = []
        remedy = f"write {columns} columns of UTF-8 text, separated by {self.separator!r}"
        for i, line in enumerate(block.data.split(b"\n")[:-1]):
            found = None
            try:
                content = line.rstrip(b"\r").decode("utf-8")
                cells = len(self._cells(content))
                if b"\0" in line:
                    found = "a NUL byte, a sign of a damaged file"
                elif cells != columns:
                    found = f"{cells} columns"
                elif self.quote and content.count(self.quote) % 2:
                    found = "a quote that is not closed"
            except UnicodeDecodeError:
                found = "bytes that are not UTF-8 text"
            except csv.Error as failure:
                found = f"a line that is not CSV ({failure})"
            if found is not None:
                text = line.decode("utf-8", "backslashreplace")
                bad.append(BadRow(str(path), block.first_line + i, "", found, remedy, text))
        return bad

    def _cells(self, line: str) -> list[str]:
        if not self.quote or self.quote not in line:
            return line.split(self.separator)
        return next(csv.reader([line], delimiter=self.separator, quotechar=self.quote), [""])


_BATCH_ROWS = 1 << 18


# Some rows of a file, the number of the first one, and the bytes read so far.
_Batch = tuple[Path, pyarrow.RecordBatch, int, int]


@dataclass(frozen=True)
class Parquet:
    """Reads Parquet files."""

    missing: Sequence[str]

    def count(self, path: Path) -> Iterator[tuple[int, int]]:
        """Rows and bytes of a file."""
        with open_parquet(path) as file:
            yield file.metadata.num_rows, os.path.getsize(path)

    def names(self, path: Path, _: str) -> list[str]:
        """Names of a file's columns."""
        with open_parquet(path) as file:
            return file.schema_arrow.names

    def pieces(self, path: Path, used: set[str]) -> Iterator[_Batch]:
        """See `Delimited.pieces`."""
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

    def rows(self, piece: _Batch, used: set[str]) -> RawRows:
        """Rows of a piece, with the columns as they are stored."""
        path, batch, first, position = piece
        numbers = np.arange(first, first + len(batch))
        frame = pl.from_arrow(batch)
        frame = frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
        frame, marks = without_marks(frame, self.missing)
        return RawRows(frame, str(path), numbers + 1, numbers, None, position, marks=marks)


@contextmanager
def open_parquet(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Open a file. Raises a `DataError` if it is damaged, as is found here or while it is read."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as failure:
        raise DataError(
            f"{path}: cannot be read as Parquet ({failure}); copy or download it again"
        ) from None
