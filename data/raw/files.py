"""Files of a raw log, read as bytes."""

from __future__ import annotations

import glob
import gzip
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow

from stampede.data.errors import DataError


def expand(patterns: str | Sequence[str]) -> list[Path]:
    """Files that the names and globs stand for; those of one glob in natural order.

    Raises:
        DataError: nothing is there.
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
        found += sorted(files, key=_naturally)
    if len(set(found)) != len(found):
        twice = next(file for file in found if found.count(file) > 1)
        raise DataError(f"{twice}: stands twice among the files")
    return found


def _naturally(path: Path) -> list[tuple[int, str | int]]:
    """Sorts day_2 before day_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(part)) if part.isdigit() else (0, part) for part in parts]


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The content of a plain, `.gz` or `.zst` file, and the file on disk, whose position tells
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
            yield _zstandard(raw), raw
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


def _zstandard(raw: BinaryIO) -> BinaryIO:
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd")
    return io.BufferedReader(_Raw(stream), 1 << 20)
