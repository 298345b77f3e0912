"""Whether files are as they were written."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stampede.data.prepared.arrays import sha256
from stampede.data.prepared.manifest import FileEntry


def check_lengths(folder: Path, files: Sequence[FileEntry]) -> None:
    """Check that all files are there and as long as they were.

    Raises:
        ValueError: which one is not.
    """
    for entry in files:
        found = length_of(folder / entry.name)
        if found != entry.bytes:
            raise ValueError(f"{entry.name} has {found:,} bytes, {entry.bytes:,} were written")


def length_of(path: Path) -> int:
    """Bytes of a plain file.

    Raises:
        ValueError: it is none, or a link that may lead anywhere.
    """
    try:
        status = path.lstat()
    except OSError as failure:
        raise ValueError(f"{path.name}: {failure.strerror or failure}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a file of its own")
    return status.st_size


def check_contents(folder: Path, files: Sequence[FileEntry]) -> None:
    """Check that all files have their checksums, several at a time.

    Raises:
        ValueError: which one has not.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for _ in threads.map(lambda entry: _check_content(folder, entry), files):
            pass


def _check_content(folder: Path, entry: FileEntry) -> None:
    try:
        found = sha256(folder / entry.name)
    except OSError as failure:
        raise ValueError(f"{entry.name}: {failure.strerror or failure}") from None
    if found != entry.sha256:
        raise ValueError(f"{entry.name} has not the checksum it was written with")
