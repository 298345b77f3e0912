"""Atomic files and folders, appended lines, checksums, strict JSON, bounded reading."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import math
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from tqdm.auto import tqdm

# Most bytes of a text, and of a large manifest.
MOST_TEXT, MOST_MANIFEST = 16 << 20, 256 << 20


def read_file(path: Path, most: int = MOST_TEXT) -> bytes:
    """The content of a file.

    Raises:
        OSError: it is not a regular file, is larger than `most` bytes, or cannot be read.
    """
    if (size := file_size(path)) > most:
        raise OSError(errno.EFBIG, f"has {size:,} bytes; the limit is {most:,}", str(path))
    return path.read_bytes()


def file_size(path: Path) -> int:
    """Length in bytes of a regular file; opening a pipe, for example, would wait forever.

    Raises:
        OSError: it is not a regular file, or is missing.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return status.st_size


def read_json(path: Path, most: int = MOST_TEXT) -> Any:
    """The content of a file of JSON, see `parse_json`."""
    return parse_json(read_file(path, most))


def parse_json(content: bytes) -> Any:
    """Values of JSON whose numbers are finite and whose text can be printed.

    Raises:
        ValueError: it is something else.
    """
    values = json.loads(content, parse_float=_finite_number, parse_constant=_finite_number)
    # Half of a UTF-16 pair, which Python reads and cannot write.
    if b"\\u" in content:
        json.dumps(values, ensure_ascii=False).encode()
    return values


def _finite_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside `path` to write to; rename it to `path` if the block succeeds."""
    unfinished = hidden(path, "tmp")
    try:
        # Left by a process that was killed.
        remove(unfinished)
        yield unfinished
        os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically; text is UTF-8."""
    with new_file(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def append(folder: Path, name: str, content: bytes) -> None:
    """Append to a file, see `open_inside`, or leave it unchanged if the disk is full."""
    with open_inside(folder, name) as file:
        before = file.tell()
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            file.truncate(before)
            raise


def open_inside(folder: Path, name: str) -> io.FileIO:
    """Open a file of a folder that we make, such as `logs/rank_0.jsonl`, to read and to append.

    Makes it, and folders on the way.

    Raises:
        OSError: it cannot be opened, is not a regular file, or is reached through a link, which
            could lead to a file of somebody else.
    """

    def opened(path: str, flags: int) -> int:
        *parents, last = name.split("/")
        here = os.open(folder, os.O_DIRECTORY)
        try:
            for parent in parents:
                with suppress(FileExistsError):
                    os.mkdir(parent, dir_fd=here)
                outer, here = here, os.open(parent, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                os.close(outer)
            # Not waiting for the other end of a pipe.
            return os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=here)
        except OSError:
            refuse_links(folder, name)
            raise
        finally:
            os.close(here)

    file = io.FileIO(folder / name, "a+", opener=opened)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is not a file", str(folder / name))
    return file


def refuse_links(folder: Path, *names: str) -> None:
    """Raise an OSError if a link within a folder of ours leads to one of its files."""
    for name in names:
        for path in (folder / name, *(folder / name).parents):
            if path == folder:
                break
            if path.is_symlink():
                raise OSError(errno.ELOOP, "is a link, which is not followed; remove it", str(path))


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_json(values: Any, indent: int | None = None) -> str:
    """Strict JSON; null for numbers that are not finite."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_finite(value) for value in values]
    if isinstance(values, float) and not math.isfinite(values):
        return None
    return values


# Folders


def hidden(path: Path, kind: str) -> Path:
    """`.NAME.kind` beside a path, for files that are unfinished or about to be deleted."""
    return path.with_name(f".{path.name}.{kind}")


def remove(path: Path) -> None:
    """Delete a file, a folder or a link (not its target); ignore errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def make_folder(
    folder: Path,
    fill: Callable[[Path], None],
    error: type[Exception],
    remedy: str = "choose another folder",
) -> bool:
    """Make a folder unless it exists; returns whether it was made.

    `fill` gets an empty folder under a hidden name beside it, which is renamed once complete.
    Leftovers of a killed process are removed; a second process waits for the first. If the folder
    cannot be written, `error` is raised with a sentence that suggests the `remedy`.
    """
    unfinished = hidden(folder, "unfinished")
    absent: list[Path] = []
    try:
        absent = [parent for parent in folder.parents if not parent.exists()]
        folder.parent.mkdir(parents=True, exist_ok=True)
        while not folder.exists():
            if unfinished.is_symlink():
                remove(unfinished)
            unfinished.mkdir(exist_ok=True)
            with _locked(unfinished, folder):
                # Another process may have finished it, or given up and removed it.
                if not unfinished.exists():
                    continue
                try:
                    for left in unfinished.iterdir():
                        remove(left)
                    fill(unfinished)
                    sync(unfinished)
                except BaseException:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    raise
                os.replace(unfinished, folder)
                sync(folder.parent)
                return True
    except OSError as failure:
        full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
        raise error(
            f"{failure.filename or folder}: cannot be written ({failure.strerror or failure}); "
            + ("free some space, or " if full else "")
            + remedy
        ) from None
    finally:
        # After a failure, such as an unreadable log, leave no empty folders.
        with suppress(OSError):
            for parent in absent:
                parent.rmdir()
    return False


@contextmanager
def _locked(unfinished: Path, folder: Path) -> Iterator[None]:
    """Hold the lock of an unfinished folder; the system releases it whenever the process ends."""
    handle = os.open(unfinished, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tqdm.write(f"waiting for another process that is making {folder}", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def delete_folder(folder: Path) -> None:
    """Delete a folder; hide it first, so that a killed process does not leave half of it."""
    deleted = hidden(folder, "deleted")
    remove(deleted)
    os.replace(folder, deleted)
    remove(deleted)


def publish_folder(unfinished: Path, folder: Path) -> None:
    """Rename a complete folder, replacing an existing one.

    If killed, the old or the new folder is there, or `recover_folders` restores the old one.
    """
    replaced = hidden(folder, "replaced")
    # A power failure must not leave the name without the files.
    sync(unfinished)
    if folder.exists():
        remove(replaced)
        os.replace(folder, replaced)
    os.replace(unfinished, folder)
    sync(folder.parent)
    remove(replaced)


def recover_folders(parent: Path, name: re.Pattern[str]) -> None:
    """Restore folders that a killed process left hidden, and remove half-written ones.

    Folders whose names do not match are left alone.
    """
    for path in parent.glob(".*.*"):
        folder, kind = parent / path.stem[1:], path.suffix
        if not name.fullmatch(folder.name):
            continue
        if kind == ".replaced" and not folder.exists():
            os.replace(path, folder)
        elif kind in (".tmp", ".deleted", ".replaced"):
            remove(path)


# Checksums


class FileEntry(BaseModel):
    """A manifest's entry for a file of its folder: name, length in bytes and SHA-256."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    bytes: Annotated[int, Field(ge=0, lt=2**62)]
    sha256: str

    @field_validator("name")
    @classmethod
    def _inside_the_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith(".") or ".." in name:
            raise ValueError(f"{name!r} is not the name of a file in this folder")
        return name


def file_entry(path: Path, folder: Path) -> FileEntry:
    """Name, length and SHA-256 of a file in a folder."""
    name = str(path.relative_to(folder))
    return FileEntry(name=name, bytes=path.stat().st_size, sha256=sha256(path))


def sha256(path: Path) -> str:
    """SHA-256 of a regular file, in hexadecimal."""
    digest = hashlib.sha256()
    file_size(path)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def difference(path: Path, entry: FileEntry, content: bool = True) -> str:
    """What is wrong with a file, perhaps in length only; empty if it matches its entry."""
    try:
        length = file_size(path)
        if length != entry.bytes:
            return f"{length:,} bytes instead of {entry.bytes:,}"
        if content and sha256(path) != entry.sha256:
            return "its content has changed (SHA-256 differs)"
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""


def check_files(folder: Path, entries: Sequence[FileEntry], content: bool = True) -> None:
    """Compare files of a folder with its manifest; a ValueError names the first that differs."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        found = threads.map(lambda one: difference(folder / one.name, one, content), entries)
        for entry, what in zip(entries, found, strict=True):
            if what:
                raise ValueError(f"{entry.name}: {what}")
