"""A text file as blocks of whole lines."""

from __future__ import annotations

import shlex
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from stampede.data.errors import DataError
from stampede.data.raw.files import open_bytes

# Some 60,000 rows of Criteo: enough for the threads of the parser, and small enough that the
# allocator gives the same memory out again; 48 MB took a fifth more time and twice the memory.
BLOCK_BYTES = 16 << 20

# A line this long is no line of a click log; it would be held in memory as a whole.
_LONGEST_LINE = 64 << 20

_PIECE = 1 << 22
_NEWLINE = ord("\n")
_BOM = b"\xef\xbb\xbf"

_COPY_AGAIN = "copy or download it again"


class _TooLongLineError(Exception):
    """A line that would fill the memory."""


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
    """The lines of a file, the next block read while the last is worked on.

    Empty lines at the end of the file are no lines.

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
            if len(held_back) > _LONGEST_LINE:
                raise DataError(
                    f"{path}: after line {lines} come more than {_LONGEST_LINE >> 20} MB of empty "
                    f"lines; {_COPY_AGAIN}"
                )
            count = count_bytes(data, _NEWLINE)
            if data:
                yield Block(data, lines + 1, count, position)
            lines += count


def count_lines(path: Path, advanced: Callable[[int], object] = lambda _: None) -> int:
    """Lines of a file, empty ones at its end left out.

    Args:
        advanced: is told how many bytes of the file on disk have been read.

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


def _read(content: BinaryIO, path: Path, line: int) -> bytes:
    """Some bytes; `line` lines came before."""
    try:
        return content.read1(_PIECE)
    except (EOFError, zlib.error, OSError) as failure:
        raise _unreadable(path, line, failure) from None


def _whole_lines(content: BinaryIO, size: int) -> bytes:
    """The next lines, of about so many bytes."""
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
    """Refuse a file whose lines end as on old Macs: all of it would be one line.

    Args:
        start: of the file.
    """
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
    """What to tell of a file that cannot be read on; rows are never left out for that."""
    # What the system finds has a number; gzip and zstandard have words for damage.
    if getattr(failure, "errno", None) is not None:
        return DataError(f"{path}: {failure.strerror}")
    unpack, name = _unpacked(path)
    return DataError(
        f"{path}: a damaged or truncated compressed file ({failure}), whose lines after line "
        f"{line:,} cannot all be read; {_COPY_AGAIN}. To train without them, save what can be read "
        f"(`{unpack} > {shlex.quote(f'part_{name}')}`), and give that file"
    )
