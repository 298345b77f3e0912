"""Files of a raw log: found by name or glob, decompressed, and read in blocks of whole lines."""

from __future__ import annotations

import errno
import glob
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import repeat, takewhile
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow

from stampede import stores
from stampede.data.errors import DataError, NoSuchFileError
from stampede.data.parallel import computed_ahead

# Some 60,000 rows of Criteo: enough for the parser's threads, and small enough for the allocator
# to reuse memory; 48 MB took a fifth more time and twice the memory.
BLOCK_BYTES = 16 << 20

# More than the end of a line, and of an empty one before it.
_TAIL = 16
# Read at a time from a store around the end of a block.
_NEAR = 1 << 16

_NEWLINE = ord("\n")
_BOM = b"\xef\xbb\xbf"

# How other files begin, what they are, and what to do with them; or the function of Polars that
# reads them.
_OTHERS = {
    b"PAR1\x15": ("Parquet", "add .parquet to its name, or write `format: parquet` in the schema"),
    b"ARROW1\0": ("Arrow (Feather)", "read_ipc"),
    b"Obj\x01": ("Avro", "read_avro"),
    b"\x1f\x8b\x08": ("compressed by gzip", "add .gz to its name"),
    b"\x28\xb5\x2f\xfd": ("compressed by Zstandard", "add .zst to its name"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"BZh91AY": ("compressed by bzip2", "unpack it, or compress it by gzip or Zstandard"),
    b"\xfd7zXZ\0": ("compressed by xz", "unpack it, or compress it by gzip or Zstandard"),
}
# The first line of objects or lists; a name of a column may be in brackets.
_JSON = re.compile(rb"\s*[{\[]\s*([{\[\"]|$)")


def expand(patterns: str | Sequence[str]) -> list[Path]:
    """The files that match names and globs; the files of one glob in natural order.

    A glob leaves out names that begin with `_`, such as Spark's `_SUCCESS` and `_temporary/`, as a
    shell does with those that begin with a dot: unless it writes them itself.

    Raises:
        DataError: a name or glob matches no file, or a file is given twice.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found: list[Path] = []
    for pattern in patterns:
        if stores.is_url(pattern):
            found += _in_a_store(pattern, found)
            continue
        pattern = str(stores.local(pattern))
        names = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if "/_" not in f"/{pattern}":
            names = [name for name in names if "/_" not in f"/{name}"]
        if not names:
            raise NoSuchFileError(
                f"{pattern}: no such file or glob; write the path of the click log"
            )
        for file in sorted(map(Path, names), key=naturally):
            if file.is_dir():
                if (file / "manifest.json").exists():
                    raise DataError(f"{file}: is a prepared folder; write the files of the log")
                raise DataError(f"{file}: is a folder; write its files, such as {file}/*")
            if not file.is_file():
                raise NoSuchFileError(f"{file}: is not a file; write the path of the click log")
            if file in found:
                raise DataError(f"{file}: is given twice; name each file once")
            found.append(file)
    return found


def _in_a_store(pattern: str, before: Sequence[Path]) -> list[Path]:
    try:
        matches = stores.matches(pattern)
    except stores.StoreError as failure:
        kind = NoSuchFileError if failure.errno == errno.ENOENT else DataError
        raise kind(str(failure)) from None
    if not matches:
        raise NoSuchFileError(f"{pattern}: no such file or glob; write the URL of the click log")
    for file in matches:
        if file in before:
            raise DataError(f"{file}: is given twice; name each file once")
    return sorted(matches, key=naturally)


def naturally(path: Path) -> list[tuple[int, str | int]]:
    """A sort key that puts day_2 before day_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(part)) if part.isdigit() else (0, part) for part in parts]


@dataclass(frozen=True)
class Block:
    """Some whole lines, each ended by a newline, and the bytes of the file on disk read so far.

    The first line of a file has the number 1.
    """

    data: bytes
    first_line: int
    lines: int
    position: int


class Stretch(NamedTuple):
    """A part of a file that can be read by itself, in the very pieces of reading all of it."""

    begin: int = 0  # its first byte; of Parquet its first row group
    count: int | None = None  # its blocks, or row groups; None: to the end of the file
    rows: int = 0  # in the file before it
    columns: Sequence[str] = ()  # as the header of a text names them


def block_starts(path: Path) -> list[int]:
    """The bytes where the blocks of a plain text begin, if each can be read by itself; else 0.

    Raises:
        DataError: the file cannot be read.
    """
    starts = [0]
    if path.suffix.lower() in (".gz", ".zst"):
        return starts
    try:
        with stores.opened(path, _NEAR) as file:
            while file.seek(starts[-1] + BLOCK_BYTES - _TAIL) and (tail := file.read(_TAIL - 1)):
                tail += file.readline()
                # The next block would begin with the empty lines, see `read_blocks`.
                if tail[:-1].rstrip(b"\r").endswith(b"\n"):
                    return [0]
                starts.append(file.tell())
        length = stores.length(path)
    except OSError as failure:
        raise DataError(f"{path}: {failure.strerror or failure}") from None
    return starts[: max(1, sum(start < length for start in starts))]


def read_blocks(
    path: Path, begin: int = 0, count: int | None = None, lines: int = 0
) -> Iterator[Block]:
    """The lines of a file without empty lines at its end, with one block read ahead.

    Args:
        begin: byte where a block begins.
        count: of blocks; None: to the end of the file.
        lines: before it.

    Raises:
        DataError: the file cannot be read, or is damaged or truncated.
    """
    sizes = repeat(BLOCK_BYTES) if count is None else repeat(BLOCK_BYTES, count)
    blanks = b""  # Empty lines, perhaps at the end of the file.
    try:
        with stores.opened(path) as on_disk:
            on_disk.seek(begin)
            content: BinaryIO = on_disk
            if path.suffix.lower() == ".gz":
                content = gzip.GzipFile(fileobj=on_disk)
            elif path.suffix.lower() == ".zst":
                stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(on_disk), "zstd")
                content = io.BufferedReader(stream, 1 << 20)

            def whole_lines(size: int) -> tuple[bytes, int]:
                data = content.read(size)
                data = data if data.endswith(b"\n") else data + content.readline()
                return data, on_disk.tell()

            with closing(computed_ahead(whole_lines, sizes, 1)) as blocks:
                for data, position in takewhile(lambda block: block[0], blocks):
                    if not data.endswith(b"\n"):
                        data += b"\n"
                    if lines == 0:
                        _check_is_text(path, data)
                        data = data.removeprefix(_BOM)
                    data = blanks + data
                    end = _end_of_text(data)
                    data, blanks = data[:end], data[end:]
                    newlines = count_bytes(data, _NEWLINE)
                    if data:
                        yield Block(data, lines + 1, newlines, position)
                    lines += newlines
    except (EOFError, zlib.error, OSError) as failure:
        # System errors have a number; errors of gzip and Zstandard do not.
        if getattr(failure, "errno", None) is not None:
            raise DataError(f"{path}: {failure.strerror}") from None
        raise DataError(
            f"{path}: damaged or truncated after line {lines:,}, or not compressed as its name "
            f"says ({failure}); copy or download it again"
        ) from None


def _end_of_text(data: bytes) -> int:
    """Bytes of some lines without the empty ones at their end."""
    # To strip a text is to copy it, so first look at its end.
    for tail in (data[-_TAIL:], data):
        if text := len(tail.rstrip(b"\r\n")):
            return data.find(b"\n", len(data) - len(tail) + text) + 1
    return 0


def _check_is_text(path: Path, data: bytes) -> None:
    """Refuse a file that begins like another format's."""
    for magic, (what, remedy) in _OTHERS.items():
        if data.startswith(magic):
            remedy = _by_polars(path, remedy) if remedy.startswith("read_") else remedy
            raise DataError(f"{path}: is {what}; {remedy}")


def check_no_json(path: Path, header: bytes) -> None:
    """Refuse a file whose header line begins like JSON."""
    if _JSON.match(header):
        read = "read_json" if header.lstrip().startswith(b"[") else "read_ndjson"
        raise DataError(f"{path}: is JSON; {_by_polars(path, read)}")


def _by_polars(path: Path, read: str) -> str:
    name = path.name.split(".")[0]
    return f'convert it to Parquet: `pl.{read}("{path}").write_parquet("{name}.parquet")` of Polars'


def count_bytes(data: bytes, value: int) -> int:
    """Number of occurrences of a byte, several times faster than `bytes.count`."""
    array, piece = np.frombuffer(data, dtype=np.uint8), 1 << 18  # within the cache
    return sum(
        int(np.count_nonzero(array[i : i + piece] == value)) for i in range(0, len(array), piece)
    )
