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
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from tqdm.auto import tqdm

from stampede.files import hidden, new_file, read_json, remove, to_json, write_file

# The package that reads each kind of store, beside `universal_pathlib`.
_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "hdfs": "pyarrow"}

# Where the local folders are; else `stampede/stores` in the user's cache.
_PLACE = "STAMPEDE_STORES"

# Read at a time: at 20 ms and 100 MB/s, a tenth of the time is spent waiting.
_BLOCK_BYTES = 16 << 20

_THREADS = 8


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
    scheme, _, key = _checked(text).partition("://")
    parts = [part for part in key.split("/") if part]
    if ".." in parts or "." in parts:
        raise StoreError(errno.EINVAL, "write the URL without . and ..", text)
    return _place().joinpath(scheme, *parts)


def working(url: str) -> Path:
    """The folder in which a run works whose results are copied to a URL.

    It is not `local(url)`, whose content follows the store: readers must not change it.
    """
    return _place() / "runs" / local(url).relative_to(_place())


def scratch(name: str) -> Path:
    """A place on this machine for what is soon deleted."""
    return hidden(_place() / name, "copy")


def _place() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get(_PLACE) or f"{cache}/stampede/stores").expanduser()


def _checked(url: str) -> str:
    """A URL without credentials."""
    scheme, _, rest = url.partition("://")
    if re.match(r"[^/]*:[^@]*@", rest):
        shown = f"{scheme}://...@{rest.rpartition('@')[2]}"
        raise StoreError(errno.EINVAL, "write the credentials into the environment", shown)
    return url


def _connected(url: str) -> tuple[Any, str]:
    """The file system of a store, and the key within it."""
    scheme = _checked(url).partition("://")[0]
    if scheme not in _DRIVERS:
        known = ", ".join(f"{one}://" for one in _DRIVERS)
        raise StoreError(errno.EINVAL, f"an unknown kind of store; write one of {known}", url)
    try:
        import fsspec

        fs, key = fsspec.core.url_to_fs(url)
    except ImportError:
        needed = f"`pip install universal_pathlib {_DRIVERS[scheme]}`"
        raise StoreError(errno.ENOPKG, f"needs other packages: {needed}", url) from None
    return fs, key


@contextmanager
def _asking(url: str) -> Iterator[tuple[Any, str]]:
    """A store and a key; what fails there is told as a `StoreError`, what fails here is not."""
    try:
        yield _connected(url)
    except StoreError:
        raise
    except OSError as failure:
        if not failure.filename and failure.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise _told(url, failure) from failure
        # Of the disk here.
        place = failure.filename or _place()
        reason = f"its copy in {place} cannot be written or read ({failure.strerror})"
        raise StoreError(failure.errno, reason, url) from None
    # The errors of the drivers have no common type.
    except Exception as failure:
        raise _told(url, failure) from failure


def _told(url: str, failure: Exception) -> StoreError:
    """What a driver says, as a sentence."""
    if isinstance(failure, FileNotFoundError):
        return StoreError(errno.ENOENT, "is not there", url)
    if isinstance(failure, FileExistsError):
        return StoreError(errno.EEXIST, "is already there", url)
    if isinstance(failure, PermissionError):
        reason = f"access is refused ({failure!s:.200}); check the credentials"
        return StoreError(errno.EACCES, reason, url)
    reason = f"the store cannot be used ({failure!s:.200}); check its address and credentials"
    return StoreError(errno.EIO, reason, url)


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


# Small files


def read_object(url: str) -> bytes | None:
    """The content of a file; None if it is not there."""
    try:
        with _asking(url) as (fs, key):
            fs.invalidate_cache()
            return fs.cat_file(key)
    except StoreError as failure:
        if failure.errno == errno.ENOENT:
            return None
        raise


def write_object(url: str, content: bytes, is_new: bool) -> None:
    """Write a file; if it `is_new`, a `StoreError` EEXIST is raised where it is there."""
    with _asking(url) as (fs, key):
        fs.pipe_file(key, content, mode="create" if is_new else "overwrite")


def delete_object(url: str) -> None:
    """Delete a file."""
    with _asking(url) as (fs, key):
        fs.rm_file(key)


# Folders, and files that are written


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a file or folder is there."""
    if not is_url(path):
        return local(path).exists()
    with _asking(str(path)) as (fs, key):
        fs.invalidate_cache()
        return bool(fs.exists(key))


def fetched(path: str | os.PathLike[str]) -> Path:
    """A path as it is; or a local copy of what a URL names, with what has changed since.

    Raises:
        StoreError: it is not there, or the store cannot be used.
    """
    here, url = local(path), str(path)
    if is_url(url):
        with _Shared(url, here) as shared:
            if not shared.there():
                raise StoreError(errno.ENOENT, "is not there", url)
            shared.download()
    return here


def published(path: str | os.PathLike[str], here: Path | None = None) -> None:
    """Copy what has changed in a local folder to a URL; does nothing for other paths.

    Files whose names begin with a dot stay here.

    Args:
        here: by default `local(path)`.

    Raises:
        StoreError: the store cannot be used.
    """
    here = here or local(path)
    if is_url(path) and here.exists():
        with _Shared(str(path), here) as shared:
            shared.upload()


def taken_up(url: str, here: Path) -> None:
    """Let a run go on in its working folder: with what is there, or else with what the store holds.

    Where the store has what was last copied, the folder is as new or newer, if a run was killed
    or a copy failed. Else another machine has gone on: what was not copied is set aside.
    """
    with _Shared(url, here) as shared:
        there = shared.there()
        if shared.is_ours(there):
            for name in shared.record.keys() & shared.files().keys() - there.keys():
                # A process that was killed has deleted it there, to replace it.
                del shared.record[name]
            shared.download(keep=True)
            return
        if shared.files().keys() - shared.record.keys():
            aside = hidden(here, "set_aside")
            remove(aside)
            os.replace(here, aside)
            print(f"{url}: was continued elsewhere; what was not copied from here is in {aside}")
        shared.download()


def forgotten(url: str, here: Path) -> None:
    """Empty a working folder, whose URL gets other content with the next `published`."""
    with _Shared(url, here) as shared:
        there = shared.there()
        remove(here)
        shared.record.clear()
        shared.record.update({name: {"id": _content_id(one)} for name, one in there.items()})


@contextmanager
def outgoing(path: str | os.PathLike[str], overwrite: bool) -> Iterator[Path]:
    """Yield a path to write to, which is published if it stands for a URL.

    Raises:
        StoreError: it is already there and may not be replaced, or the store cannot be used.
    """
    here = local(path)
    if is_url(path):
        with _Shared(str(path), here) as shared:
            there = shared.there()
            if there and not overwrite:
                raise StoreError(errno.EEXIST, "is already there; write another name", str(path))
            # Who replaces a folder looks at what it holds.
            if "" not in there and there:
                shared.download()
        if not there or "" in there:
            forgotten(str(path), here)
    yield here
    published(path)


class _Shared:
    """A local folder, or the file "", and its counterpart in a store; for one process at a time.

    Attributes:
        record: of each file that was alike in both, `id` in the store and `here`, its state.
    """

    def __init__(self, url: str, here: Path) -> None:
        self._url, self._here = url, here
        self._about = hidden(here, "store")
        self.record: dict[str, Any] = {}

    def __enter__(self) -> _Shared:
        self._about.parent.mkdir(parents=True, exist_ok=True)
        self._lock = hidden(self._here, "copying").open("a")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        with suppress(OSError, ValueError):
            self.record = read_json(self._about)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._note()
        finally:
            self._lock.close()

    def _note(self) -> None:
        write_file(self._about, to_json(self.record))

    def files(self) -> dict[str, Path]:
        """The local files by name, but for those that begin with a dot."""
        if self._here.is_file():
            return {"": self._here}
        found = [file for file in self._here.rglob("*") if file.is_file()]
        names = {str(file.relative_to(self._here)): file for file in found}
        return {name: file for name, file in names.items() if not _is_hidden(name)}

    def there(self) -> dict[str, Any]:
        """The files of the store by name, as its driver describes them."""
        with _asking(self._url) as (fs, key):
            fs.invalidate_cache()
            found = fs.find(key, detail=True)
        names = {name.removeprefix(key).lstrip("/"): one for name, one in found.items()}
        return {name: one for name, one in names.items() if not _is_hidden(name)}

    def is_ours(self, there: dict[str, Any]) -> bool:
        """Whether the store holds only what was copied from here, perhaps by a killed process."""
        if not there:
            return not self.record

        def is_known(name: str) -> bool:
            return self.record.get(name, {}).get("id") == _content_id(there[name])

        return all(is_known(name) or self._begins_as(name) for name in there)

    def _begins_as(self, name: str) -> bool:
        """Whether a file of the store is a local one, to which lines may have been added since."""
        url, file = f"{self._url}/{name}" if name else self._url, self._here / name
        if not file.is_file():
            return False
        with opened(url) as one, file.open("rb") as other:
            while block := one.read(1 << 20):
                if other.read(len(block)) != block:
                    return False
        return True

    def download(self, keep: bool = False) -> None:
        """Bring the local files up to date; `keep` those that the store does not have."""
        for last_try in (False, True):
            try:
                self._download(self.there(), keep)
                return
            except StoreError as failure:
                # A run has deleted an old checkpoint in the meantime.
                if last_try or failure.errno != errno.ENOENT:
                    raise

    def _download(self, found: dict[str, Any], keep: bool) -> None:
        there = {name: one for name, one in found.items() if not _is_unfinished(name, found)}
        files = self.files()
        # What somebody has deleted here must not be deleted there.
        for name in self.record.keys() - files.keys():
            if "here" in self.record[name] or not keep:
                del self.record[name]
        for name in sorted(files.keys() - there.keys(), key=_stage, reverse=True):
            if not keep:
                remove(files[name])
                self.record.pop(name, None)

        def is_old(name: str) -> bool:
            if keep or name not in files:
                # What is recorded without a file will be replaced, see `forgotten`.
                return name not in files and name not in self.record
            known = self.record.get(name, {})
            alike = known.get("id") == _content_id(there[name])
            return not alike or known.get("here") != _state(files[name])

        def get(name: str) -> None:
            target = self._here / name if name else self._here
            target.parent.mkdir(parents=True, exist_ok=True)
            with new_file(target) as unfinished, _asking(self._url) as (fs, key):
                fs.get_file(f"{key}/{name}" if name else key, str(unfinished))
            self.record[name] = {"id": _content_id(there[name]), "here": _state(target)}

        wanted = {name: one["size"] for name, one in there.items() if is_old(name)}
        self._each(get, wanted, "fetching")

    def upload(self) -> None:
        """Bring the store up to date."""
        files = self.files()

        def drop(name: str) -> None:
            with suppress(FileNotFoundError), _asking(self._url) as (fs, key):
                fs.rm_file(f"{key}/{name}" if name else key)
            self.record.pop(name, None)

        def put(name: str) -> None:
            before = _state(files[name])
            with _asking(self._url) as (fs, key):
                target = f"{key}/{name}" if name else key
                fs.put_file(str(files[name]), target)
                fs.invalidate_cache()
                self.record[name] = {"id": _content_id(fs.info(target)), "here": before}

        def is_new(name: str) -> bool:
            return self.record.get(name, {}).get("here") != _state(files[name])

        gone = self.record.keys() - files.keys()
        changed = {name for name in files if is_new(name)} | gone
        # While a file of a folder changes, its manifest must not vouch for it.
        void = {
            name
            for name in self.record.keys() - gone
            if _stage(name) and any(_vouches(name, other) for other in changed)
        }
        for name in sorted(void | gone, key=_stage, reverse=True):
            drop(name)
        wanted = {name: files[name].stat().st_size for name in files if is_new(name)}
        self._each(put, wanted, "publishing")

    def _each(self, action: Callable[[str], None], sizes: Mapping[str, int], title: str) -> None:
        """Copy files, several at a time, stage by stage."""
        about = {"desc": f"{title} {self._here.name}", "delay": 1, "leave": False}
        bar = tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, **about)
        with bar, ThreadPoolExecutor(_THREADS) as threads:
            for stage in range(3):
                names = [name for name in sizes if _stage(name) == stage]
                for name, _ in zip(names, threads.map(action, names), strict=True):
                    bar.update(sizes[name])
                self._note()


def _stage(name: str) -> int:
    """When a file is copied: data, then what lists them, then what says that all is done."""
    last = name.rpartition("/")[2]
    return 2 if last in ("summary.json", "package.json") else int(last == "manifest.json")


def _vouches(name: str, other: str) -> bool:
    """Whether a file says that another one is whole: both are in its folder."""
    folder, slash, _ = name.rpartition("/")
    return other != name and other.startswith(folder + slash)


def _is_unfinished(name: str, names: Collection[str]) -> bool:
    """Whether a file belongs to a checkpoint without a manifest, which does not count."""
    checkpoint = re.match(r"(.*/)?checkpoints/[^/]+/", name)
    return checkpoint is not None and f"{checkpoint[0]}manifest.json" not in names


def _is_hidden(name: str) -> bool:
    """Whether a part of a name begins with a dot, or leads elsewhere."""
    return "/." in f"/{name}" or "//" in name


def _state(path: Path) -> list[int] | None:
    """Changes when a local file is written; None if it is not there."""
    with suppress(OSError):
        status = path.stat()
        return [status.st_size, status.st_mtime_ns, status.st_ino]
    return None
