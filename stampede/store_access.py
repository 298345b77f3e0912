# pyright: basic
"""Access to object stores by fsspec's drivers, with errors that a user understands."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

# The package that reads each kind of store.
_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "hdfs": "hdfs-native"}

# Loggers that print tracebacks and pages of advice on what is raised as well.
_LOGS = {"gs": ("gcsfs", "google"), "abfs": ("azure",)}

# Where the local folders are; else `stampede/stores` in the user's cache.
_PLACE = "STAMPEDE_STORES"

# Read at a time: at 20 ms and 100 MB/s, a tenth of the time is spent waiting.
_BLOCK_BYTES = 16 << 20

# Files are copied in parts that are in memory as a whole; drivers take 50 MB.
PART_BYTES = 16 << 20


class StoreError(OSError):
    """A store that cannot be reached or used; `strerror` says why, `filename` is the URL."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def is_url(path: object) -> bool:
    """Whether a path is the URL of a store; `file://` is a path of this machine."""
    return re.match(r"(?!file:)[a-z][a-z0-9+.-]*://", str(path), re.IGNORECASE) is not None


def place_of_copies() -> Path:
    """The folder of all local copies."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get(_PLACE) or f"{cache}/stampede/stores").expanduser()


@dataclass(frozen=True)
class StoreFile:
    """A file of a log in a store; has what readers of logs use of a `Path`."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        """The name from its last dot on."""
        return PurePosixPath(self.url).suffix

    @property
    def suffixes(self) -> list[str]:
        """All suffixes of the name."""
        return PurePosixPath(self.url).suffixes


def checked(url: str) -> str:
    """A URL without credentials."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    # A password may have slashes; what follows a port, of hdfs only, is a path.
    port = r"(?!\d+/)" if scheme == "hdfs" else ""
    shown = ""
    if re.match(rf"[^/]*:{port}[^@]*@", rest):
        _, at, after = place.rpartition("@")
        shown = f"{scheme}://...{at}{after if at else ''}"
    elif re.search(r"(^|&)[\w-]*(sig|signature|key|token)=", query, re.IGNORECASE):
        shown = f"{scheme}://{place}?..."
    if shown:
        raise StoreError(errno.EINVAL, "write the credentials into the environment", shown)
    if "::" in rest:
        # fsspec takes the parts of such a name for file systems.
        raise StoreError(errno.EINVAL, "a name with :: cannot be read; rename it", url)
    return url


# What finds the file system of a URL's store, and the key within it.
Connect = Callable[[str], tuple[Any, str]]


def connected(url: str, alone: bool = False) -> tuple[Any, str]:
    """The file system of a store, and the key within it.

    Args:
        alone: with connections of its own, not those that the rest of the process waits for.
    """
    scheme = checked(url).partition("://")[0]
    if scheme not in _DRIVERS:
        known = ", ".join(f"{one}://" for one in _DRIVERS)
        raise StoreError(errno.EINVAL, f"an unknown kind of store; write one of {known}", url)
    for logger in map(logging.getLogger, _LOGS.get(scheme, ())):
        # The user may want to see more.
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)
    try:
        if scheme == "hdfs":
            from stampede.hdfs import WholeFiles

            return WholeFiles.of(url)
        import fsspec

        # Any option would give it connections of its own.
        return fsspec.core.url_to_fs(url, **({"skip_instance_cache": True} if alone else {}))
    except ImportError:
        needed = f"needs another package: `pip install {_DRIVERS[scheme]}`"
        raise StoreError(errno.ENOPKG, needed, url) from None


@contextmanager
def asking(url: str, connect: Connect = connected) -> Iterator[tuple[Any, str]]:
    """A store and a key; what fails there is told as a `StoreError`, what fails here is not."""
    try:
        yield connect(url)
    except StoreError:
        raise
    except OSError as failure:
        # Some drivers name their files, too.
        is_here = Path(str(failure.filename or "")).is_relative_to(place_of_copies())
        if not is_here and failure.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise _told(url, failure) from failure
        place = failure.filename or place_of_copies()
        reason = f"its copy in {place} cannot be written or read ({failure.strerror})"
        raise StoreError(failure.errno, reason, url) from None
    # The errors of the drivers have no common type.
    except Exception as failure:
        raise _told(url, failure) from failure


def _status(failure: Exception) -> int | None:
    """The status of a store's answer, where the driver tells it."""
    # Of s3fs.
    answer = getattr(failure.__cause__, "response", None)
    if isinstance(answer, dict):
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    # Of adlfs, and of gcsfs, which tells some refusals by their text alone.
    return getattr(failure, "status_code", None) or getattr(failure, "code", None)


def _told(url: str, failure: Exception) -> StoreError:
    """What a driver says, as a sentence."""
    status = _status(failure)
    # Hadoop says where in its code it was.
    said = " ".join(str(failure).split(r"\n\tat")[0].split())[:200]
    is_refused = said.startswith("Forbidden") or "AccessControlException" in said
    if isinstance(failure, FileNotFoundError) or status == 404:
        return StoreError(errno.ENOENT, "is not there", url)
    if isinstance(failure, FileExistsError):
        return StoreError(errno.EEXIST, "is already there", url)
    if isinstance(failure, PermissionError) or status in (401, 403) or is_refused:
        reason = f"access is refused ({said}); check the credentials"
        return StoreError(errno.EACCES, reason, url)
    # Of s3fs.
    if type(failure).__name__ == "FileExpired":
        reason = "was replaced while it was read; start again, once nothing writes it"
        return StoreError(errno.ESTALE, reason, url)
    # Of HDFS, whose blocks of a deleted file are there for some seconds more.
    if "All DataNodes failed" in said:
        said = "its blocks cannot be read: it was replaced or deleted, or no data node answers"
    reason = f"the store cannot be used ({said}); check its address and credentials"
    return StoreError(errno.EIO, reason, url)


def in_parts(url: str, size: int, parts: int, is_put: bool) -> dict[str, int]:
    """Options of a driver's `put_file` or `get_file`: so many parts of a file at once."""
    scheme = url.partition("://")[0]
    if scheme == "s3":
        # It takes 10,000 parts of a file.
        return {"chunksize": max(PART_BYTES, -(-size // 10_000)), "max_concurrency": parts}
    if scheme == "abfs":
        return {"max_concurrency": parts}
    if scheme == "gs":
        return {"chunksize": PART_BYTES} if is_put else {"concurrency": parts}
    return {}


def content_id(info: dict[str, Any]) -> str:
    """Of a file's description by any driver."""
    return str([info.get(name) for name in ("size", "ETag", "etag", "mtime", "modification_time")])


def read_object(url: str, connect: Connect = connected) -> bytes | None:
    """The content of a file; None if it is not there."""
    try:
        with asking(url, connect) as (fs, key):
            fs.invalidate_cache()
            return fs.cat_file(key)
    except StoreError as failure:
        if failure.errno == errno.ENOENT:
            return None
        raise


# A file's description by its driver, and its content.
Seen = tuple[dict[str, Any], bytes]


def seen_object(url: str, connect: Connect = connected) -> Seen | None:
    """A file as it is, for `replace_object`; None if it is not there."""
    try:
        with asking(url, connect) as (fs, key):
            fs.invalidate_cache()
            # In this order: of a file that is replaced meanwhile, the description is an old one.
            return fs.info(key), fs.cat_file(key)
    except StoreError as failure:
        if failure.errno == errno.ENOENT:
            return None
        raise


def replace_object(
    url: str, content: bytes, known: Seen | None, connect: Connect = connected
) -> bool:
    """Write a file if it is still as `seen_object` has told, which is None if it was not there.

    The store itself compares, so a request that comes late does no harm. HDFS compares nothing
    but whether a file is there, and some stores like S3 answer that they do not: there it is
    written in any case, and False is returned.

    Raises:
        StoreError: EEXIST if there is another one, or the store cannot be used.
    """
    scheme = url.partition("://")[0]
    with asking(url, connect) as (fs, key):
        try:
            if known is None:
                fs.pipe_file(key, content, mode="create")
            elif scheme == "s3":
                fs.pipe_file(key, content, IfMatch=known[0]["ETag"])
            elif scheme == "abfs":
                from azure.core import MatchConditions

                same = MatchConditions.IfNotModified
                fs.pipe_file(key, content, etag=known[0]["etag"], match_condition=same)
            elif scheme == "gs":
                # The driver itself knows only how to ask whether a file is there.
                bucket, _, name = key.partition("/")
                place = f"{fs._location}/upload/storage/v1/b/{bucket}/o"
                query = {"uploadType": "media", "name": name}
                query["ifGenerationMatch"] = known[0]["generation"]
                fs.call("POST", place, data=content, **query)
            else:
                fs.pipe_file(key, content)
            return known is None or scheme != "hdfs"
        except Exception as failure:
            status = _status(failure)
            if status in (409, 412):
                raise FileExistsError(key) from failure
            # 400 may have many reasons, such as a connection that was cut.
            if status != 501:
                raise
        fs.pipe_file(key, content)
        return False


def delete_object(url: str, connect: Connect = connected) -> None:
    """Delete a file."""
    with asking(url, connect) as (fs, key):
        fs.rm_file(key)


def opened(path: Any, block_bytes: int = _BLOCK_BYTES) -> BinaryIO:
    """A file, to read; from a store so many bytes at a time."""
    if not is_url(path):
        return path.open("rb")
    with asking(str(path)) as (fs, key):
        file = fs.open(key, "rb", block_size=block_bytes, cache_type="readahead")
        return io.BufferedReader(_Stream(str(path), file), min(block_bytes, 1 << 20))


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
        with asking(self._url):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
