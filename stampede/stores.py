# pyright: basic
"""Object stores: what a URL such as `s3://bucket/clicks.csv` names, read or kept here.

The files of a log are read where they lie. Everything else - prepared data, runs, packages - has a
folder on this machine, `local(url)`: `fetched` brings it up to date, `published` copies it back.
What a rename promises on a disk, the order of writing does here: the manifest of a folder comes
last, and goes first, so a folder without one does not count.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO
from uuid import uuid4

from tqdm.auto import tqdm

from stampede.files import hidden, new_file, read_json, remove, to_json, write_file

# The package that reads each kind of store, beside `universal_pathlib`.
_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "hdfs": "pyarrow"}

# Where the local folders are; else `stampede/stores` in the user's cache.
_PLACE = "STAMPEDE_STORES"

# Read at a time: at 20 ms and 100 MB/s, a tenth of the time is spent waiting.
_BLOCK_BYTES = 16 << 20

_THREADS = 8
_LAST = "manifest.json"


class StoreError(OSError):
    """A store that cannot be reached or used; `strerror` says why, `filename` is the URL."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def is_url(path: object) -> bool:
    """Whether a path is the URL of a store; `file://` is a path of this machine."""
    return re.match(r"(?!file:)[a-z][a-z0-9+.-]*://", str(path)) is not None


def local(path: str | os.PathLike[str]) -> Path:
    """The folder or file on this machine that stands for a path or URL."""
    text = str(path).removeprefix("file://")
    if not is_url(text):
        return Path(text)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    place = os.environ.get(_PLACE) or f"{cache}/stampede/stores"
    scheme, _, key = text.partition("://")
    parts = [part for part in key.split("/") if part]
    if ".." in parts or "." in parts:
        raise StoreError(errno.EINVAL, "write the URL without . and ..", text)
    return Path(place).expanduser().joinpath(scheme, *parts)


def _connected(url: str) -> tuple[Any, str]:
    """The file system of a store, and the key within it."""
    scheme, _, rest = url.partition("://")
    if scheme not in _DRIVERS:
        known = ", ".join(f"{one}://" for one in _DRIVERS)
        raise StoreError(errno.EINVAL, f"an unknown kind of store; write one of {known}", url)
    if "@" in rest.split("/")[0] and scheme != "abfs":
        where = f"{scheme}://{rest.rpartition('@')[2]}"
        raise StoreError(errno.EINVAL, "write the credentials into the environment", where)
    try:
        import fsspec

        fs, key = fsspec.core.url_to_fs(url)
    except ImportError:
        needed = f"`pip install universal_pathlib {_DRIVERS[scheme]}`"
        raise StoreError(errno.ENOPKG, f"needs other packages: {needed}", url) from None
    return fs, key


@contextmanager
def _asking(url: str) -> Iterator[tuple[Any, str]]:
    """A store and a key; what fails is told as a `StoreError`."""
    try:
        yield _connected(url)
    except StoreError:
        raise
    except FileNotFoundError as failure:
        raise StoreError(errno.ENOENT, "is not there", url) from failure
    except PermissionError as failure:
        reason = f"access is refused ({failure!s:.200}); check the credentials"
        raise StoreError(errno.EACCES, reason, url) from failure
    except FileExistsError as failure:
        raise StoreError(errno.EEXIST, "is already there", url) from failure
    # The errors of the drivers have no common type.
    except Exception as failure:
        reason = f"the store cannot be used ({failure!s:.200}); check its address and credentials"
        raise StoreError(errno.EIO, reason, url) from failure


# Files of logs


def at(path: str) -> Any:
    """A file of this machine as a `Path`, of a store as a `UPath`, which has the same methods."""
    if not is_url(path):
        return local(path)
    with _asking(path):
        from upath import UPath

        return UPath(path)


def matches(pattern: str) -> list[Any]:
    """The files that match a URL or glob. Raises a `StoreError` if it is a folder or not there."""
    with _asking(pattern) as (fs, key):
        fs.invalidate_cache()
        is_glob = re.search(r"[*?\[]", key) is not None
        # Without a glob nothing is listed, which the user may not be allowed to do.
        found = fs.glob(key, detail=True) if is_glob else {key: fs.info(key)}
        urls = {fs.unstrip_protocol(name): info for name, info in found.items()}
    for url, info in urls.items():
        if info["type"] == "directory":
            raise StoreError(errno.EISDIR, f"is a folder; write its files, such as {url}/*", url)
    return [at(url) for url in urls]


def length(path: Any) -> int:
    """Bytes of a file."""
    if not is_url(path):
        return os.path.getsize(path)
    with _asking(str(path)) as (fs, key):
        return int(fs.info(key)["size"])


def identity(path: Any) -> str:
    """What changes when the content of a store's file does."""
    with _asking(str(path)) as (fs, key):
        return _content_id(fs.info(key))


def _content_id(info: dict[str, Any]) -> str:
    """Of a file's description by any driver."""
    return str([info.get(name) for name in ("size", "ETag", "etag", "mtime", "modificationTime")])


def opened(path: Any) -> BinaryIO:
    """A file, to read."""
    if not is_url(path):
        return path.open("rb")
    with _asking(str(path)) as (fs, key):
        file = fs.open(key, "rb", block_size=_BLOCK_BYTES, cache_type="readahead")
        return io.BufferedReader(_Stream(str(path), file), 1 << 20)


class _Stream(io.RawIOBase):
    """A file of a store whose errors name it."""

    def __init__(self, url: str, file: Any) -> None:
        self._url, self._file = url, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        with _asking(self._url):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


# Folders, and files that are written


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a file or folder is there."""
    if not is_url(path):
        return local(path).exists()
    with _asking(str(path)) as (fs, key):
        fs.invalidate_cache()
        return bool(fs.exists(key))


def fetched(path: str | os.PathLike[str], may_be_absent: bool = False) -> Path:
    """A path as it is; or a local copy of what a URL names, with what has changed since.

    The store is the truth: what it does not hold goes from the copy.

    Raises:
        StoreError: it is not there, or the store cannot be used.
    """
    here, url = local(path), str(path)
    if not is_url(url):
        return here
    with _copy_of(here) as record, _asking(url) as (fs, key):
        for last_try in (False, True):
            fs.invalidate_cache()
            found = fs.find(key, detail=True)
            there = {name.removeprefix(key).lstrip("/"): info for name, info in found.items()}
            if not there and may_be_absent:
                record.clear()
                remove(here)
                break
            if not there:
                raise StoreError(errno.ENOENT, "is not there", url)
            try:
                _download(fs, key, there, here, record)
                break
            except FileNotFoundError:
                # A run has deleted an old checkpoint in the meantime.
                if last_try:
                    raise
    return here


def _download(fs: Any, key: str, there: dict[str, Any], here: Path, record: dict[str, Any]) -> None:
    """Bring the files of a folder, or the one file "", up to date."""

    def is_new(name: str) -> bool:
        known = record.get(name, {})
        same = known.get("id") == _content_id(there[name])
        return not (same and known.get("here") == _state(here / name if name else here))

    for name in sorted(_files_of(here).keys() - there.keys(), key=_manifests_first):
        remove(here / name if name else here)
        record.pop(name, None)

    def get(name: str) -> None:
        target = here / name if name else here
        target.parent.mkdir(parents=True, exist_ok=True)
        with new_file(target) as unfinished:
            fs.get_file(f"{key}/{name}" if name else key, str(unfinished))
        record[name] = {"id": _content_id(there[name]), "here": _state(target)}

    wanted = [name for name in there if is_new(name)]
    _each(get, wanted, [there[name]["size"] for name in wanted], f"fetching {here.name}")


def published(path: str | os.PathLike[str]) -> None:
    """Copy what has changed in the local folder of a URL to the store; nothing for other paths.

    Files whose names begin with a dot stay here.

    Raises:
        StoreError: the store cannot be used.
    """
    here, url = local(path), str(path)
    if not is_url(url):
        return
    with _copy_of(here) as record, _asking(url) as (fs, key):
        names = _files_of(here)

        def put(name: str) -> None:
            before = _state(names[name])
            target = f"{key}/{name}" if name else key
            fs.put_file(str(names[name]), target)
            fs.invalidate_cache()
            record[name] = {"id": _content_id(fs.info(target)), "here": before}

        for name in sorted(record.keys() - names.keys(), key=_manifests_first):
            with suppress(FileNotFoundError):
                fs.rm_file(f"{key}/{name}" if name else key)
            del record[name]
        wanted = [n for n, file in names.items() if record.get(n, {}).get("here") != _state(file)]
        sizes = [names[name].stat().st_size for name in wanted]
        _each(put, wanted, sizes, f"publishing {here.name}")


@contextmanager
def outgoing(path: str | os.PathLike[str], overwrite: bool) -> Iterator[Path]:
    """Yield a path to write to, which is published if it stands for a URL.

    Raises:
        StoreError: it is already there and may not be replaced, or the store cannot be used.
    """
    if is_url(path):
        if exists(path) and not overwrite:
            raise StoreError(errno.EEXIST, "is already there; write another name", str(path))
        fetched(path, may_be_absent=True)
    yield local(path)
    published(path)


@contextmanager
def _copy_of(here: Path) -> Iterator[dict[str, Any]]:
    """What is known of the files that a local folder shares with its store, for one process."""
    about = hidden(here, "store")
    about.parent.mkdir(parents=True, exist_ok=True)
    with hidden(here, "copying").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            record = read_json(about)
        try:
            yield record
        finally:
            write_file(about, to_json(record))


def _each(action: Any, names: Sequence[str], sizes: Sequence[int], title: str) -> None:
    """Copy files, several at a time, the manifests after all others."""
    before = [(n, size) for n, size in zip(names, sizes, strict=True) if not _is_last(n)]
    last = [(n, size) for n, size in zip(names, sizes, strict=True) if _is_last(n)]
    with (
        tqdm(total=sum(sizes), desc=title, unit="B", unit_scale=True, delay=1, leave=False) as bar,
        ThreadPoolExecutor(_THREADS) as threads,
    ):
        for group in (before, last):
            done = threads.map(action, [name for name, _ in group])
            for (_, size), _ in zip(group, done, strict=True):
                bar.update(size)


def _is_last(name: str) -> bool:
    return Path(name).name == _LAST


def _manifests_first(name: str) -> tuple[bool, str]:
    return not _is_last(name), name


def _files_of(here: Path) -> dict[str, Path]:
    """The files of a local folder by name; a file has the name ""."""
    if here.is_file():
        return {"": here}
    names = {str(file.relative_to(here)): file for file in here.rglob("*") if file.is_file()}
    return {
        name: file for name, file in names.items() if not name.startswith(".") and "/." not in name
    }


def _state(path: Path) -> list[int] | None:
    """Changes when a local file is written; None if it is not there."""
    with suppress(OSError):
        status = path.stat()
        return [status.st_size, status.st_mtime_ns, status.st_ino]
    return None


# One run at a time


class Lease:
    """Keeps a URL to one process: `.NAME.lease` beside it, rewritten every few seconds.

    A process that was killed does not rewrite it, so the next one takes it over. No clock is
    compared: the next one looks at it for a while.
    """

    SECONDS, MISSED = 10.0, 3

    def __init__(self, url: str) -> None:
        """Take the lease. Raises a `StoreError` if another process holds it."""
        parent, _, name = url.rstrip("/").rpartition("/")
        self._url = f"{parent}/.{name}.lease"
        self._ended, self._beats, self._key = Event(), 0, uuid4().hex
        holder = self._content()
        if holder is not None:
            self._wait_for(holder, url)
        try:
            self._write("create" if holder is None else "overwrite")
            # Two processes may have taken it over at once; the last to write has it.
            time.sleep(0.0 if holder is None else self.SECONDS / 10)
            is_ours = self._key in (self._content() or "")
        except StoreError as failure:
            if failure.errno != errno.EEXIST:
                raise
            is_ours = False
        if not is_ours:
            reason = "was taken by another run just now; choose another run.name"
            raise StoreError(errno.EBUSY, reason, url)
        self._thread = Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _wait_for(self, holder: str, url: str) -> None:
        """Wait until another process has ended, or raise."""
        about = json.loads(holder)
        who = f"process {about['process']} on {about['host']}"
        if about["host"] == socket.gethostname() and not _runs(about["process"]):
            return
        most = self.SECONDS * self.MISSED
        tqdm.write(f"{url} was being written by {who}; waiting {most:.0f} s for it to end")
        until = time.monotonic() + most
        while time.monotonic() < until:
            time.sleep(self.SECONDS / 10)
            now = self._content()
            if now is None:
                return
            if now != holder:
                reason = f"is being written by {who}; end it first, or choose another run.name"
                raise StoreError(errno.EBUSY, reason, url)

    def _content(self) -> str | None:
        try:
            with _asking(self._url) as (fs, key):
                fs.invalidate_cache()
                return fs.cat_file(key).decode()
        except StoreError as failure:
            if failure.errno == errno.ENOENT:
                return None
            raise

    def _write(self, mode: str = "overwrite") -> None:
        self._beats += 1
        who = {"host": socket.gethostname(), "process": os.getpid(), "key": self._key}
        with _asking(self._url) as (fs, key):
            fs.pipe_file(key, json.dumps(who | {"beat": self._beats}).encode(), mode=mode)

    def _keep(self) -> None:
        while not self._ended.wait(self.SECONDS):
            # Tried again at the next beat.
            with suppress(StoreError):
                self._write()

    def release(self) -> None:
        """Let the next process take it."""
        self._ended.set()
        self._thread.join()
        with suppress(StoreError), _asking(self._url) as (fs, key):
            fs.rm_file(key)


def _runs(process: int) -> bool:
    """Whether a process of this machine is alive."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
