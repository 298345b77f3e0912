"""Rows of a CSV or TSV file, as text, and of a Parquet file."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from stampede import stores
from stampede.data.errors import DataError
from stampede.data.formulas import part_of_objects, parts_of_objects
from stampede.data.missing import without_marks
from stampede.data.raw.files import (
    Block,
    Stretch,
    block_starts,
    check_no_json,
    count_bytes,
    read_blocks,
)
from stampede.data.raw.nested import names_within, unnested
from stampede.data.raw.rows import BadRow, RawRows, pieces_of
from stampede.settings import cut, shown

_REMEDY = (
    "names of columns, `separator`, or, if line 1 is a row and not a header, `columns: [label, "
    "user, item]`"
)


_NEWLINE = ord("\n")

WHOLE = Stretch()

# Longer records are not looked for: csv's limit of a cell.
_LONGEST_RECORD = 1 << 17


@dataclass(frozen=True)
class Records:
    """Some rows of a file as they are written; a quoted cell may hold line ends."""

    path: Path
    columns: Sequence[str]
    text: bytes
    lines: np.ndarray  # `[n]` number of the line on which each begins, from 1
    starts: np.ndarray | None  # `[n + 1]` where they begin in the text; None: each is a line
    first: int  # number of the first within the file, from 0
    position: int  # bytes of the file read so far

    def each(self) -> list[bytes]:
        """The records."""
        return pieces_of(self.text, self.starts)

    def take(self, kept: Sequence[int]) -> Records:
        """Some of them, by index."""
        every = self.each()
        found = [every[i] for i in kept]
        starts = self.starts
        if starts is not None:
            starts = np.concatenate([[0], np.cumsum([len(one) for one in found], dtype=np.int64)])
        return replace(self, text=b"".join(found), lines=self.lines[kept], starts=starts)


@dataclass(frozen=True)
class Delimited:
    """The form of a delimited file."""

    separator: str  # one character between columns
    quote: str  # one character around cells that hold separators; empty: none
    columns: Sequence[str]  # their names, where the file has no header line
    numeric: Set[str]  # columns whose cells are numbers
    missing: Sequence[str]  # texts that mean that a value is missing
    json: Set[str]  # columns of JSON, also the keys or values of a column's JSON objects
    labels: Set[str]  # columns of labels and weights

    def count(self, path: Path) -> Iterator[tuple[int, int]]:
        """Rows counted and bytes read so far; the last pair is that of the whole file."""
        rows = 0
        yield rows, 0
        for records in self.pieces(path, set()):
            rows += len(records.lines)
            yield rows, records.position

    def names(self, path: Path, optional: Set[str]) -> list[str]:
        """Names of a file's columns; without a header, line 1 decides if it has the `optional`."""
        first = next(read_blocks(path), None)
        if not self.columns:
            return [] if first is None else self._header(path, first)[0]
        without = [name for name in self.columns if name not in optional]
        line = b"" if first is None else first.data.partition(b"\n")[0].rstrip(b"\r")
        cells = self._cells(line.decode("utf-8", "replace"))
        return without if len(cells) == len(without) else list(self.columns)

    def stretches(self, path: Path, most: int) -> list[Stretch]:
        """A file in stretches of so many blocks, whose `rows` are not known yet."""
        starts = block_starts(path)
        counts = [most] * ((len(starts) - 1) // most) + [None]
        names = () if self.columns or len(counts) == 1 else self.names(path, set())
        each = zip(starts[::most], counts, strict=True)
        return [Stretch(start, n, columns=names) for start, n in each]

    def survey(self, path: Path, stretch: Stretch) -> tuple[int, bool]:
        """Rows of a stretch if no cell is quoted; and whether that is so."""
        rows, is_plain = -self._headers(stretch), True
        for block in read_blocks(path, stretch.begin, stretch.count):
            rows += block.lines
            is_plain &= not self.quote or self.quote.encode() not in block.data
        return rows, is_plain

    def _headers(self, stretch: Stretch) -> int:
        return int(not self.columns and not stretch.begin)

    def pieces(self, path: Path, used: set[str], stretch: Stretch = WHOLE) -> Iterator[Records]:
        """A file, or a stretch of it, in pieces that can be parsed independently.

        Raises:
            DataError: the file cannot be read or lacks a used column.
        """
        columns, rows, held = list(self.columns), stretch.rows, b""
        lines = rows
        if stretch.begin and not columns:
            columns, lines = list(stretch.columns), rows + 1
        with closing(read_blocks(path, stretch.begin, stretch.count, lines)) as blocks:
            for block in blocks:
                if not columns:
                    columns, block = self._header(path, block)
                within = _in_objects(columns, used, self.json)
                absent = sorted(used - {*columns, *within})
                if absent:
                    holding = parts_of_objects(columns).get(absent[0])
                    remedy = f"`separator: json` if {holding} holds JSON objects, " * bool(holding)
                    raise DataError(
                        f"{path}: no column {absent[0]!r}; its header line has "
                        f"{cut(', '.join(columns))}; correct the schema: {remedy}{_REMEDY}"
                    )
                first = block.first_line - held.count(b"\n")
                numbers = range(first, block.first_line + block.lines)
                records, held = self._records(path, columns, held + block.data, numbers, True)
                position = block.position
                yield replace(records, first=rows, position=position)
                rows += len(records.lines)
            if held:
                numbers = numbers[-held.count(b"\n") :]
                records, _ = self._records(path, columns, held, numbers, False)
                yield replace(records, first=rows, position=position)

    def _records(
        self, path: Path, columns: list[str], text: bytes, numbers: range, has_more: bool
    ) -> tuple[Records, bytes]:
        """The records of numbered lines, and the last lines if their record may end further on."""
        if not self.quote or self.quote.encode() not in text:
            lines = np.arange(numbers.start, numbers.stop)
            return Records(path, columns, text, lines, None, 0, 0), b""
        array = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero(array == _NEWLINE) + 1
        begins = np.concatenate([[0], ends[:-1]])
        quotes = np.flatnonzero(array == ord(self.quote))
        within = np.diff(np.searchsorted(quotes, ends), prepend=0)
        # A quoted cell opens or ends on lines with an odd number of quotes.
        odd = np.flatnonzero(within % 2).tolist()
        is_first, held, at = np.ones(len(ends), bool), len(ends), 0
        while at < len(odd):
            begin, last = odd[at], odd[at + 1] if at + 1 < len(odd) else None
            start, at = begins[begin], at + 1
            end = len(text) if last is None else ends[last]
            if end - start > _LONGEST_RECORD:
                continue
            if last is None:
                held = begin if has_more else held
            elif self._fault(text[start:end], len(columns)) is None:
                is_first[begin + 1 : last + 1] = False
                at += 1
        end = begins[held] if held < len(ends) else len(text)
        lines = numbers.start + np.flatnonzero(is_first[:held])
        starts = None
        if not is_first[:held].all():
            starts = np.append(begins[:held][is_first[:held]], end)
        return Records(path, columns, text[:end], lines, starts, 0, 0), text[end:]

    def rows(self, piece: Records, used: set[str]) -> RawRows:
        """Rows of a piece, with the used columns; null is missing.

        Columns are String; if every cell of the numeric ones is a number, these are Float64.
        """
        bad, numbers = [], piece.first + np.arange(len(piece.lines))
        frame = self._frame(piece, used)
        if frame is None:
            bad, kept = self._bad_records(piece)
            piece, numbers = piece.take(kept), numbers[kept]
            frame = self._frame(piece, used)
        if frame is None:
            raise DataError(
                f"{piece.path}: cannot be parsed from line {piece.lines[0]} on; check the quotes "
                "of its cells"
            )
        frame, marks = without_marks(frame, self.missing, self.labels, self.numeric)
        file, text, starts = str(piece.path), piece.text, piece.starts
        return RawRows(
            frame, file, piece.lines, numbers, text, piece.position, bad, marks, starts=starts
        )

    def _header(self, path: Path, block: Block) -> tuple[list[str], Block]:
        line, _, rest = block.data.partition(b"\n")
        check_no_json(path, line)
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

    def _frame(self, records: Records, used: set[str]) -> pl.DataFrame | None:
        """The used columns; None if any record is bad."""
        text, columns, count = records.text, records.columns, len(records.lines)
        if not count:
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
                if len(frame) == count and self._columns_agree(records):
                    within = _in_objects(columns, used, self.json)
                    frame = frame.with_columns(part_of_objects(c, n) for n, c in within.items())
                    # It returns many small chunks, which would slow all later steps.
                    return frame.select(sorted(used)).rechunk()
        return None

    def _columns_agree(self, records: Records) -> bool:
        """Whether no record is short; the parser has refused long ones."""
        text, columns = records.text, len(records.columns)
        if not self.quote or self.quote.encode() not in text:
            count = len(records.lines)
            return count_bytes(text, ord(self.separator)) == (columns - 1) * count
        if not self._quotes_surround_cells(text):
            return all(self._fault(one, columns) is None for one in records.each())
        names = [str(i) for i in range(columns)]
        options = pyarrow.csv.ParseOptions(
            delimiter=self.separator,
            quote_char=self.quote,
            ignore_empty_lines=False,
            newlines_in_values=records.starts is not None,
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

    def _quotes_surround_cells(self, text: bytes) -> bool:
        """Whether quotes are around cells or doubled; the parser reads `""a"",1` as `a`, 1."""
        array = np.frombuffer(text, np.uint8)
        quotes = np.flatnonzero(array == ord(self.quote))
        if len(quotes) % 2:
            return False
        ends = np.zeros(256, bool)
        ends[[ord(self.quote), ord(self.separator), _NEWLINE]] = True
        # Before the first byte comes the last one, a line end.
        before, after = array[quotes[::2] - 1], array[quotes[1::2] + 1]
        next_but_one = array.take(quotes[1::2] + 2, mode="clip")
        is_return = (after == ord("\r")) & (next_but_one == _NEWLINE)
        return bool(ends[before].all() and (ends[after] | is_return).all())

    def _bad_records(self, records: Records) -> tuple[list[BadRow], list[int]]:
        """Records that are not UTF-8 or have a wrong number of columns; the indices of others."""
        bad, kept, columns = [], [], len(records.columns)
        remedy = f"write {columns} columns of UTF-8 text, separated by {self.separator!r}"
        for i, record in enumerate(records.each()):
            found = self._fault(record, columns)
            if found is None:
                kept.append(i)
                continue
            text = record.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
            line = int(records.lines[i])
            bad.append(BadRow(str(records.path), line, "", found, remedy, text))
        return bad, kept

    def _fault(self, record: bytes, columns: int) -> str | None:
        """What is wrong with a record as a whole; None if it has the right number of columns."""
        try:
            content = record.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes that are not UTF-8 text"
        if b"\0" in record:
            return "a NUL byte, a sign of a damaged file"
        is_quoted = bool(self.quote) and self.quote in content
        if not is_quoted:
            cells = content.count(self.separator) + 1
            return None if cells == columns else f"{cells} columns"
        quoted = {"delimiter": self.separator, "quotechar": self.quote}
        try:
            found = list(csv.reader(io.StringIO(content, newline=""), strict=True, **quoted))
        except csv.Error as failure:
            if "unexpected end" in str(failure):
                return "a quote that is not closed"
            if "expected after" in str(failure):
                return "text after the closing quote of a cell (a quote within it is written twice)"
            return f"a line that is not CSV ({failure})"
        if len(found) != 1 or content.count(self.quote) % 2:
            return "a quote that is not closed"
        return None if len(found[0]) == columns else f"{len(found[0])} columns"

    def _cells(self, line: str) -> list[str]:
        if not self.quote or self.quote not in line:
            return line.split(self.separator)
        return next(csv.reader([line], delimiter=self.separator, quotechar=self.quote), [""])


def _in_objects(columns: Iterable[str], used: Set[str], json: Set[str]) -> dict[str, str]:
    """The column of each used name that means the keys or values of its JSON objects."""
    every = parts_of_objects(columns)
    return {name: every[name] for name in sorted((used & json) - set(columns)) if name in every}


_BATCH_ROWS = 1 << 18


# Some rows of a file, the number of the first one, and the bytes read so far.
_Batch = tuple[Path, pyarrow.RecordBatch, int, int]


@dataclass(frozen=True)
class Parquet:
    """Reads Parquet files."""

    missing: Sequence[str]
    json: Set[str]  # see `Delimited`
    labels: Set[str]

    def count(self, path: Path) -> Iterator[tuple[int, int]]:
        """Rows and bytes of a file."""
        with open_parquet(path) as file:
            yield file.metadata.num_rows, stores.length(path)

    def names(self, path: Path, _: Set[str]) -> list[str]:
        """Names of a file's columns, and of what is within them."""
        with open_parquet(path) as file:
            return [*file.schema_arrow.names, *names_within(file.schema_arrow)]

    def stretches(self, path: Path, most: int) -> list[Stretch]:
        """A file in stretches that begin with a row group and with a batch, of `most` or more."""
        found = [WHOLE]
        with open_parquet(path) as file:
            rows = 0
            for group in range(file.metadata.num_row_groups):
                if rows >= found[-1].rows + most * _BATCH_ROWS and rows % _BATCH_ROWS == 0:
                    found[-1] = found[-1]._replace(count=group - found[-1].begin)
                    found.append(Stretch(group, None, rows))
                rows += file.metadata.row_group(group).num_rows
        return found

    def survey(self, path: Path, stretch: Stretch) -> tuple[int, bool]:
        """See `Delimited.survey`."""
        with open_parquet(path) as file:
            return sum(file.metadata.row_group(n).num_rows for n in _groups(file, stretch)), True

    def pieces(self, path: Path, used: set[str], stretch: Stretch = WHOLE) -> Iterator[_Batch]:
        """See `Delimited.pieces`."""
        with open_parquet(path) as file:
            size = stores.length(path)
            total = max(file.metadata.num_rows, 1)
            own, within = file.schema_arrow.names, names_within(file.schema_arrow)
            within = self._in_texts(file.schema_arrow, used) | within
            if absent := sorted(used - {*own, *within}):
                names = cut(", ".join([*own, *within]))
                raise DataError(
                    f"{path}: no column {absent[0]!r}; its columns are {names}; rename one, or "
                    "correct the schema"
                )
            done, columns = stretch.rows, sorted({within.get(name, name) for name in used})
            groups = _groups(file, stretch)
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns):
                first, done = done, done + len(batch)
                yield path, batch, first, size * done // total

    def rows(self, piece: _Batch, used: set[str]) -> RawRows:
        """Rows of a piece, with the columns as they are stored."""
        path, batch, first, position = piece
        numbers = np.arange(first, first + len(batch))
        frame = pl.from_arrow(batch)
        in_texts = self._in_texts(batch.schema, used)
        frame = frame.with_columns(
            part_of_objects(column, name) for name, column in in_texts.items()
        )
        frame = with_names_as_text(unnested(frame, sorted(used)))
        frame, marks = without_marks(frame, self.missing, self.labels)
        return RawRows(frame, str(path), numbers + 1, numbers, None, position, marks=marks)

    def _in_texts(self, schema: pyarrow.Schema, used: Set[str]) -> dict[str, str]:
        of = pyarrow.types
        texts = [
            one.name for one in schema if of.is_string(one.type) or of.is_large_string(one.type)
        ]
        return _in_objects(texts, used - set(schema.names), self.json)


def with_names_as_text(frame: pl.DataFrame) -> pl.DataFrame:
    """A frame whose categories, also in lists, are texts."""
    named = pl.Categorical, pl.Enum
    lists = [n for n, t in frame.schema.items() if isinstance(t, pl.List) and t.inner in named]
    return frame.with_columns(
        pl.col(*named).cast(pl.String), pl.col(lists).cast(pl.List(pl.String))
    )


def _groups(file: pyarrow.parquet.ParquetFile, stretch: Stretch) -> range:
    """The row groups of a stretch."""
    every = range(file.metadata.num_row_groups)
    return every[stretch.begin :][: stretch.count]


def suffix_of(path: Path) -> str:
    """The suffix of a file's name before it was compressed, in small letters."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in suffixes[::-1] if suffix not in (".gz", ".zst")), "")


def is_parquet(path: Path) -> bool:
    """Whether a file's name is one of Parquet."""
    return suffix_of(path) in (".parquet", ".pq")


@contextmanager
def open_parquet(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Open a file. Raises a `DataError` if it is damaged, as is found here or while it is read."""
    try:
        # The system reads a file of the disk faster than Python does.
        source = stores.opened(path) if stores.is_url(path) else path
        with pyarrow.parquet.ParquetFile(source, page_checksum_verification=True) as file:
            yield file
    except stores.StoreError as failure:
        raise DataError(str(failure)) from None
    except (pyarrow.ArrowException, OSError) as failure:
        raise DataError(
            f"{path}: cannot be read as Parquet ({failure}); copy or download it again"
        ) from None
