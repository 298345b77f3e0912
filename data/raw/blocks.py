"""A text file as blocks of whole lines."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from stampede.data.errors import DataError
from stampede.data.raw.bad_rows import BadRow, BadRows
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


def read_blocks(path: Path, bad_rows: BadRows) -> Iterator[Block]:
    """The lines of a file, the next block read while the last is worked on.

    Empty lines at the end of the file are no lines.

    Raises:
        DataError: the file cannot be read, or is damaged or truncated and `bad_rows` does not
            leave that out.
    """
    lines = 0
    held_back = b""  # Empty lines, which may turn out to be the last.
    with open_bytes(path) as (content, on_disk), ThreadPoolExecutor(1) as thread:
        coming = thread.submit(_whole_lines, content, BLOCK_BYTES)
        more = True
        while more:
            data, damage = _result(coming, path, lines)
            position = on_disk.tell()
            more = bool(data) and damage is None
            if more:
                coming = thread.submit(_whole_lines, content, BLOCK_BYTES)
            tail = b""
            if damage is not None:
                # The last line may be cut anywhere.
                whole = data.rfind(b"\n") + 1
                data, tail = data[:whole], data[whole:]
            elif data and not data.endswith(b"\n"):
                data += b"\n"
            if lines == 0 and data.startswith(_BOM):
                data = data[len(_BOM) :]
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
            if damage is not None:
                bad_rows.report([_truncated(path, lines + 1, damage, tail)])


def count_lines(path: Path, advanced: Callable[[int], object] = lambda _: None) -> int:
    """Lines of a file, empty ones at its end left out; a cut line at the end counts.

    Args:
        advanced: is told how many bytes of the file on disk have been read.

    Raises:
        DataError: nothing of the file can be read.
    """
    newlines = before_last_line = 0
    has_lines = False
    with open_bytes(path) as (content, on_disk):
        while data := _read(content, path, is_first=not newlines):
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


def _read(content: BinaryIO, path: Path, is_first: bool) -> bytes:
    """Some bytes; none after a damaged place, which those who read the rows will tell of."""
    try:
        return content.read1(_PIECE)
    except (EOFError, zlib.error, OSError) as failure:
        if getattr(failure, "errno", None) is not None:
            raise DataError(f"{path}: {failure.strerror}") from None
        if is_first:
            raise DataError(f"{path}: {_damaged(failure)}; {_COPY_AGAIN}") from None
        return b""


def _whole_lines(content: BinaryIO, size: int) -> tuple[bytes, Exception | None]:
    """The next lines, and what is wrong with the file after them."""
    pieces: list[bytes] = []
    got = 0
    try:
        # Not `read`, which loses what it has when it comes to a damaged place.
        while got < size and (piece := content.read1(size - got)):
            pieces.append(piece)
            got += len(piece)
        if pieces and not pieces[-1].endswith(b"\n"):
            pieces.append(content.readline(_LONGEST_LINE))
            if len(pieces[-1]) == _LONGEST_LINE:
                raise _TooLongLineError
    except (EOFError, zlib.error) as damage:
        return b"".join(pieces), damage
    except OSError as damage:
        if damage.errno is not None:
            raise
        return b"".join(pieces), damage  # gzip's and zstandard's words for a damaged file
    return b"".join(pieces), None


def _result(
    coming: Future[tuple[bytes, Exception | None]], path: Path, line: int
) -> tuple[bytes, Exception | None]:
    try:
        return coming.result()
    except _TooLongLineError:
        raise DataError(
            f"{path}: a line after line {line} is longer than {_LONGEST_LINE >> 20} MB; a click "
            "log ends its lines with \\n or \\r\\n"
        ) from None
    except OSError as failure:
        raise DataError(f"{path}: {failure.strerror or failure}") from None


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


def _truncated(path: Path, line: int, damage: Exception, tail: bytes) -> BadRow:
    return BadRow(
        file=str(path),
        line=line,
        column="",
        found=_damaged(damage),
        remedy=_COPY_AGAIN,
        text=tail.decode("utf-8", "replace"),
    )


def _damaged(failure: Exception) -> str:
    return f"a damaged or truncated compressed file ({failure})"
