"""Folders that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stampede.data.errors import DataError


def make_whole(folder: Path, make: Callable[[Path], None]) -> None:
    """Make a folder unless it is there.

    It is made under a hidden name beside it and renamed when whole. Leftovers of a process that
    was killed are removed; a second process waits for the first.

    Args:
        make: fills an empty folder.

    Raises:
        DataError: it cannot be written.
    """
    unfinished = folder.parent / f".{folder.name}.unfinished"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent):
            if folder.exists():
                return
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                unfinished.mkdir()
                make(unfinished)
                _flush(unfinished)
                os.replace(unfinished, folder)
                _flush(folder.parent)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as failure:
        raise DataError(
            f"{failure.filename or folder}: cannot be written ({failure.strerror or failure}); "
            "free some space, or choose another folder"
        ) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which the system releases however the process ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _flush(folder: Path) -> None:
    """Make names in a folder durable before it is taken for whole."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
