"""Whether files are as they were written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stampede.data.prepared.checksum import sha256
from stampede.data.prepared.manifest import FileEntry


def check_lengths(folder: Path, files: Sequence[FileEntry]) -> None:
    """Check that all files are there and as long as they were.

    Raises:
        ValueError: which one is not.
    """
    for entry in files:
        try:
            found = (folder / entry.name).stat().st_size
        except OSError as failure:
            raise ValueError(f"{entry.name}: {failure.strerror or failure}") from None
        if found != entry.bytes:
            raise ValueError(f"{entry.name} has {found:,} bytes, {entry.bytes:,} were written")


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
