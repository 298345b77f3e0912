"""Files of a raw log: found by name or glob, decompressed, and read in blocks of whole lines."""

from __future__ import annotations

import glob
import gzip
import io
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow

from stampede.data.errors import DataError

# Some 60,000 rows of Criteo: enough for the threads of the parser, and small enough that the
# allocator gives the same memory out again; 48 MB took a fifth more time and twice the memory.
BLOCK_BYTES = 16 << 20

# No line of a click log is this long; it would be held in memory as a whole.
_LONGEST_LINE = 64 << 20

_PIECE = 1 << 22
_NEWLINE = ord("\n")
_BOM = b"\xef\xbb\xbf"


def expand(patterns: str | Sequence[str]) -> list[Path]:
    """The files that match names and globs; those of one glob in natural order.

    Raises:
        DataError: there is no such file.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found: list[Path] = []
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not matches:
            raise DataError(f"{pattern}: no such file or glob; write where the click log is")
        files = [Path(match) for match in matches]
        for file in files:
            if file.is_dir():
                raise DataError(f"{file}: is a folder; write its files, such as {file}/*.csv")
        found += sorted(files, key=naturally)
    if len(set(found)) != len(found):
        twice = next(file for file in found if found.count(file) > 1)
        raise DataError(f"{twice}: is given twice; name each file once")
    return found


def naturally(path: Path) -> list[tuple[int, str | int]]:
    """Sorts day_2 before day_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(part)) if part.isdigit() else (0, part) for part in parts]


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The content of a plain, `.gz` or `.zst` file, and the file on disk, whose position shows
    how much of it has been read.

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
            yield io.BufferedReader(_Raw(stream), 1 << 20), raw
        else:
            yield raw, raw


class _Raw(io.RawIOBase):
    """A stream of pyarrow, which has no `read1` and `readline` of its own."""

    def __init__(self, stream: pyarrow.NativeFile) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        read = self._stream.read(len(buffer))
        buffer[: len(read)] = read
        return len(read)


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
    """The lines of a file, without empty lines at its end; one block is read ahead.

    Raises:
        DataError: the file cannot be read, is damaged or truncated, or has no line ends.
    """
    lines = 0
    held_back = b""  # Empty lines, which may turn out to be the last.
    with open_bytes(path) as (content, on_disk), ThreadPoolExecutor(1) as thread:
        coming = thread.submit(_whole_lines, content, BLOCK_BYTES)
        while data := _result(coming, path, lines):
            position = on_disk.tell()
            coming = thread.submit(_whole_lines, content, BLOCK_BYTES)
            if not data.endswith(b"\n"):
                data += b"\n"
            if lines == 0:
                _check_line_ends(path, data)
                data = data.removeprefix(_BOM)
            data, held_back = _without_trailing_blanks(held_back + data if held_back else data)
            count = count_bytes(data, _NEWLINE)
            if data:
                yield Block(data, lines + 1, count, position)
            lines += count


def count_lines(path: Path, advanced: Callable[[int], object] = lambda _: None) -> int:
    """Count the lines of a file, without empty lines at its end.

    Args:
        advanced: called with the number of bytes of the file on disk read so far.

    Raises:
        DataError: the file cannot be read, is damaged or truncated, or has no line ends.
    """
    newlines = before_last_line = 0
    has_lines = False
    with open_bytes(path) as (content, on_disk):
        while data := _read(content, path, newlines):
            if not newlines and not has_lines:
                _check_line_ends(path, data)
            count = count_bytes(data, _NEWLINE)
            filled = len(data.rstrip(b"\r\n"))
            if filled:
                has_lines = True
                before_last_line = newlines + count - data.count(b"\n", filled)
            newlines += count
            advanced(on_disk.tell())
    return before_last_line + has_lines


def count_bytes(data: bytes, value: int) -> int:
    """How often a byte occurs; several times faster than `bytes.count`."""
    array, piece = np.frombuffer(data, dtype=np.uint8), 1 << 18  # within the cache
    return sum(
        int(np.count_nonzero(array[i : i + piece] == value)) for i in range(0, len(array), piece)
    )


class _TooLongLineError(Exception):
    """A line is too long to hold in memory."""


def _read(content: BinaryIO, path: Path, line: int) -> bytes:
    """Some bytes; `line` lines came before."""
    try:
        return content.read1(_PIECE)
    except (EOFError, zlib.error, OSError) as failure:
        raise _unreadable(path, line, failure) from None


def _whole_lines(content: BinaryIO, size: int) -> bytes:
    """The next lines, about `size` bytes."""
    data = content.read(size)
    if not data or data.endswith(b"\n"):
        return data
    rest = content.readline(_LONGEST_LINE)
    if len(rest) == _LONGEST_LINE:
        raise _TooLongLineError
    return data + rest


def _result(coming: Future[bytes], path: Path, line: int) -> bytes:
    try:
        return coming.result()
    except _TooLongLineError:
        raise DataError(
            f"{path}: a line after line {line} is longer than {_LONGEST_LINE >> 20} MB; a click "
            f"log ends its lines with \\n or \\r\\n ({_convert(path)} gives it such ends where it "
            "has \\r alone)"
        ) from None
    except (EOFError, zlib.error, OSError) as failure:
        raise _unreadable(path, line, failure) from None


def _check_line_ends(path: Path, start: bytes) -> None:
    """Refuse line ends of old Macs (\\r alone): the whole file would be one line."""
    if b"\r" in start.partition(b"\n")[0].removesuffix(b"\r"):
        raise DataError(
            f"{path}: its lines end with \\r alone; write \\n instead, as {_convert(path)} does"
        )


def _convert(path: Path) -> str:
    """A command that turns \\r into \\n."""
    source, plain = _unpacked(path)
    return f"`{source} | tr '\\r' '\\n' > {shlex.quote(f'lines_{plain}')}`"


def _unpacked(path: Path) -> tuple[str, str]:
    """A command that prints a file's content, and the file's name without `.gz` or `.zst`."""
    unpack = {".gz": "gzip -dc", ".zst": "zstd -dc"}.get(path.suffix.lower())
    name = path.stem if unpack else path.name
    return f"{unpack or 'cat'} {shlex.quote(str(path))}", name


def _without_trailing_blanks(data: bytes) -> tuple[bytes, bytes]:
    """The lines up to the last that is not empty, and the empty ones after it."""
    if (
        data
        and not data.endswith((b"\n\n", b"\n\r\n", b"\r\n\r\n"))
        and data not in (b"\n", b"\r\n")
    ):
        return data, b""  # Without a copy of the block.
    stripped = data.rstrip(b"\r\n")
    end = data.find(b"\n", len(stripped)) + 1 if stripped else 0
    return data[:end], data[end:]


def _unreadable(path: Path, line: int, failure: Exception) -> DataError:
    """The refusal of a file that cannot be read to its end; no option leaves out its rest."""
    # The system's errors have a number; gzip and zstandard have words for damage.
    if getattr(failure, "errno", None) is not None:
        return DataError(f"{path}: {failure.strerror}")
    unpack, name = _unpacked(path)
    return DataError(
        f"{path}: a damaged or truncated compressed file ({failure}), whose lines after line "
        f"{line:,} cannot all be read; copy or download it again. To train without them, save what "
        f"can be read (`{unpack} > {shlex.quote(f'part_{name}')}`), and give that file"
    )
