"""Folders that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tqdm.auto import tqdm

from stampede.data.errors import DataError


def make_whole(folder: Path, make: Callable[[Path], None]) -> bool:
    """Make a folder unless it is there.

    It is made under a hidden name beside it and renamed when whole. Leftovers of a process that
    was killed are removed; a second process waits for the first.

    Args:
        make: fills an empty folder.

    Returns:
        Whether it was made.

    Raises:
        DataError: it cannot be written.
    """
    unfinished = folder.parent / f".{folder.name}.unfinished"
    absent: list[Path] = []
    try:
        absent = [parent for parent in folder.parents if not parent.exists()]
        folder.parent.mkdir(parents=True, exist_ok=True)
        while not folder.exists():
            unfinished.mkdir(exist_ok=True)
            with _locked(unfinished) as is_still_there:
                # Another process may have finished it, or given up and removed it.
                if is_still_there():
                    _fill(unfinished, make)
                    os.replace(unfinished, folder)
                    sync_folder(folder.parent)
                    return True
    except OSError as failure:
        full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"{failure.filename or folder}: cannot be written ({failure.strerror or failure}); "
            + ("free some space, or choose another folder" if full else "choose another folder")
        ) from None
    finally:
        # Where nothing was made, as of a log that cannot be read, no empty folder is left.
        with suppress(OSError):
            for parent in absent:
                parent.rmdir()
    return False


def _fill(folder: Path, make: Callable[[Path], None]) -> None:
    try:
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        make(folder)
        sync_folder(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[Callable[[], bool]]:
    """Hold a folder's lock, which the system releases however the process ends.

    Gives a function that says whether the folder is still at its place.
    """
    handle = os.open(folder, os.O_RDONLY)

    def is_still_there() -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(folder))
        except FileNotFoundError:
            return False

    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tqdm.write(f"waiting for another process that makes {folder}", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield is_still_there
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder outlast a failure of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
