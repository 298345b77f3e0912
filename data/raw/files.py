"""Files of a raw log: found by name or glob, decompressed, and read in blocks of whole lines."""

from __future__ import annotations

import glob
import gzip
import io
import os
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow

from stampede.data.errors import DataError

# Some 60,000 rows of Criteo: enough for the parser's threads, and small enough for the allocator
# to reuse memory; 48 MB took a fifth more time and twice the memory.
BLOCK_BYTES = 16 << 20

# A line is held in memory as a whole; no click log has one this long.
_LONGEST_LINE = 64 << 20

_NEWLINE = ord("\n")
_COMPRESSED = {".gz": ("gzip", b"\x1f\x8b"), ".zst": ("Zstandard", b"\x28\xb5\x2f\xfd")}
_BOM = b"\xef\xbb\xbf"


def expand(patterns: str | Sequence[str]) -> list[Path]:
    """The files that match names and globs; the files of one glob in natural order.

    Raises:
        DataError: a name or glob matches no file, or a file is given twice.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found: list[Path] = []
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not matches:
            raise DataError(f"{pattern}: no such file or glob; write the path of the click log")
        for file in sorted(map(Path, matches), key=naturally):
            if file.is_dir():
                raise DataError(f"{file}: is a folder; write its files, such as {file}/*.csv")
            if file in found:
                raise DataError(f"{file}: is given twice; name each file once")
            found.append(file)
    return found


def naturally(path: Path) -> list[tuple[int, str | int]]:
    """A sort key that puts day_2 before day_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(part)) if part.isdigit() else (0, part) for part in parts]


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a plain, `.gz` or `.zst` file.

    Gives its content, and the file on disk, whose position tells how much has been read.

    Raises:
        DataError: it cannot be opened.
    """
    try:
        raw = path.open("rb")
    except OSError as failure:
        raise DataError(f"{path}: {failure.strerror or failure}") from None
    with raw:
        if path.suffix.lower() == ".gz":
            yield gzip.GzipFile(fileobj=raw), raw
        elif path.suffix.lower() == ".zst":
            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd")
            yield io.BufferedReader(stream, 1 << 20), raw
        else:
            yield raw, raw


@dataclass(frozen=True)
class Block:
    """Some whole lines, each ended by a newline.

    Attributes:
        data: their bytes.
        first_line: number of the first, from 1.
        lines: how many.
        position: bytes of the file on disk read so far.
    """

    data: bytes
    first_line: int
    lines: int
    position: int


def read_blocks(path: Path) -> Iterator[Block]:
    """The lines of a file without empty lines at its end, with one block read ahead.

    Raises:
        DataError: the file cannot be read, is damaged or truncated, or has no line ends.
    """
    lines = 0
    blanks = b""  # Empty lines, perhaps at the end of the file.
    with open_bytes(path) as (content, on_disk), ThreadPoolExecutor(1) as thread:
        coming = thread.submit(_whole_lines, content, BLOCK_BYTES)
        while True:
            try:
                data = coming.result()
            except (EOFError, zlib.error, OSError) as failure:
                raise _unreadable(path, lines, failure) from None
            if not data:
                return
            if not data.endswith(b"\n") and len(data) >= BLOCK_BYTES + _LONGEST_LINE:
                raise DataError(
                    f"{path}: a line after line {lines} is longer than {_LONGEST_LINE >> 20} MB; a "
                    "click log ends its lines with \\n or \\r\\n"
                )
            position = on_disk.tell()
            coming = thread.submit(_whole_lines, content, BLOCK_BYTES)
            if not data.endswith(b"\n"):
                data += b"\n"
            if lines == 0:
                _check_line_ends(path, data)
                data = data.removeprefix(_BOM)
            data = blanks + data
            text = len(data.rstrip(b"\r\n"))
            end = data.find(b"\n", text) + 1 if text else 0
            data, blanks = data[:end], data[end:]
            count = count_bytes(data, _NEWLINE)
            if data:
                yield Block(data, lines + 1, count, position)
            lines += count


def count_bytes(data: bytes, value: int) -> int:
    """Number of occurrences of a byte, several times faster than `bytes.count`."""
    array, piece = np.frombuffer(data, dtype=np.uint8), 1 << 18  # within the cache
    return sum(
        int(np.count_nonzero(array[i : i + piece] == value)) for i in range(0, len(array), piece)
    )


def _whole_lines(content: BinaryIO, size: int) -> bytes:
    """The next lines, about `size` bytes."""
    data = content.read(size)
    return data if data.endswith(b"\n") else data + content.readline(_LONGEST_LINE)


def _check_line_ends(path: Path, start: bytes) -> None:
    """Refuse lines that end with \\r alone, as on old Macs: the whole file would be one line."""
    if b"\r" in start.partition(b"\n")[0].removesuffix(b"\r"):
        unpack, name = _unpack(path)
        command = f"{unpack} | tr '\\r' '\\n' > {shlex.quote(f'lines_{name}')}"
        raise DataError(
            f"{path}: its lines end with \\r alone; write \\n instead, as `{command}` does"
        )


def _unpack(path: Path) -> tuple[str, str]:
    """A command that prints a file's content, and the file's name without `.gz` or `.zst`."""
    unpack = {".gz": "gzip -dc", ".zst": "zstd -dc"}.get(path.suffix.lower())
    return f"{unpack or 'cat'} {shlex.quote(str(path))}", path.stem if unpack else path.name


def _unreadable(path: Path, line: int, failure: Exception) -> DataError:
    """An error for a file that cannot be read to its end; skipping bad rows does not help here."""
    # System errors have a number; errors of gzip and zstandard do not.
    if getattr(failure, "errno", None) is not None:
        return DataError(f"{path}: {failure.strerror}")
    kind, magic = _COMPRESSED.get(path.suffix.lower(), ("", b""))
    with path.open("rb") as raw:
        if raw.read(len(magic)) != magic:
            return DataError(
                f"{path}: is not a {kind} file; rename it if it is plain text, or copy it again"
            )
    where = f"; some line after line {line:,} cannot be read" if line else ""
    unpack, name = _unpack(path)
    command = f"{unpack} | head -n -1 > {shlex.quote(f'part_{name}')}"
    return DataError(
        f"{path}: damaged or truncated compressed file ({failure}){where}. Copy or download it "
        f"again. To train without the rest, save the whole lines (`{command}`) and use that file"
    )
