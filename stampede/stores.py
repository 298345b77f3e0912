# pyright: basic
"""Object stores: what a URL such as `s3://bucket/clicks.csv` names, read or kept here.

The files of a log are read where they lie. Everything else - prepared data, runs, packages - has a
folder on this machine, `local(url)`: `fetched` brings it up to date, `published` copies it back.
What a rename promises on a disk, the order of writing does here: the manifest of a folder comes
last, and goes first, so a folder without one does not count. Checkpoints take the same way, not
that of torch's fsspec writer: its files count one by one, and a run that was killed goes on from
what is here. Logs take fsspec's drivers, as PyArrow and Polars read no `abfs://` and `hdfs://`
with the credentials and errors of the other commands.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from stampede.files import hidden, remove
from stampede.lease import Lease
from stampede.store_access import (
    StoreError,
    StoreFile,
    asking,
    checked,
    content_id,
    delete_object,
    is_url,
    opened,
    place_of_copies,
    read_object,
)
from stampede.store_copies import SharedFolder, counts

__all__ = [
    "StoreError",
    "asking",
    "at",
    "continued",
    "delete_object",
    "exists",
    "fetched",
    "forgotten",
    "identity",
    "is_checkpoint_data",
    "is_url",
    "length",
    "local",
    "matches",
    "opened",
    "outgoing",
    "published",
    "read_object",
    "read_range",
    "scratch",
    "taken_up",
    "working",
]


def local(path: str | os.PathLike[str]) -> Path:
    """The folder or file on this machine that stands for a path or URL."""
    text = str(path).removeprefix("file://")
    if not is_url(text):
        return Path(text)
    scheme, _, key = checked(text).partition("://")
    parts = [part for part in key.split("/") if part]
    if ".." in parts or "." in parts:
        raise StoreError(errno.EINVAL, "write the URL without . and ..", text)
    return place_of_copies().joinpath(scheme, *parts)


def working(url: str) -> Path:
    """The folder in which a run works whose results are copied to a URL.

    It is not `local(url)`, whose content follows the store: readers must not change it.
    """
    return place_of_copies() / "runs" / local(url).relative_to(place_of_copies())


def scratch(name: str) -> Path:
    """A place on this machine for what is soon deleted."""
    return hidden(place_of_copies() / name, "copy")


# Files of logs


def at(path: str) -> Any:
    """A file of this machine as a `Path`, of a store as a `StoreFile`."""
    return StoreFile(path) if is_url(path) else local(path)


def matches(pattern: str) -> list[Any]:
    """The files that match a URL or glob. Raises a `StoreError` if it is a folder or not there."""
    with asking(pattern) as (fs, key):
        fs.invalidate_cache()
        is_glob = re.search(r"[*?\[]", key) is not None
        # As on a disk: beside other characters two are one.
        glob = "/".join(p if p == "**" else re.sub(r"\*+", "*", p) for p in key.split("/"))
        # Without a glob nothing is listed, which the user may not be allowed to do.
        found = fs.glob(glob, detail=True) if is_glob else {}
        # As on a disk, without hidden files, such as leases, and without Spark's `_SUCCESS`.
        for mark in ("/.", "/_"):
            if mark not in f"/{key}":
                found = {name: one for name, one in found.items() if mark not in f"/{name}"}
        # A name, too, may have a bracket or a question mark.
        if not is_glob or (not found and fs.exists(key)):
            found = {key: fs.info(key)}
    # Not the driver's own URLs: it leaves out the host of hdfs://host:8020/a.csv, and the account
    # of abfs://clicks@account.dfs.core.windows.net/a.csv.
    alike = os.path.commonprefix([pattern.rstrip("/")[::-1], key[::-1]])[::-1]
    place, root = pattern.rstrip("/").removesuffix(alike), key.removesuffix(alike)
    urls = {place + name.removeprefix(root): info for name, info in found.items()}
    for url, info in urls.items():
        if info["type"] == "directory":
            raise StoreError(errno.EISDIR, f"is a folder; write its files, such as {url}/*", url)
    return [at(url) for url in urls]


def length(path: Any, anew: bool = False) -> int:
    """Bytes of a file; of a store's as it was last listed, or else `anew`."""
    if not is_url(path):
        return os.path.getsize(path)
    with asking(str(path)) as (fs, key):
        if anew:
            fs.invalidate_cache()
        return int(fs.info(key)["size"])


def identity(path: Any) -> str:
    """What changes when the content of a store's file does."""
    with asking(str(path)) as (fs, key):
        return content_id(fs.info(key))


def read_range(url: str, start: int, stop: int) -> bytes:
    """The bytes `start` to `stop - 1` of a file."""
    with asking(url) as (fs, key):
        return fs.cat_file(key, start=start, end=stop)


# Folders, and files that are written


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a file or folder is there."""
    if not is_url(path):
        return local(path).exists()
    with asking(str(path)) as (fs, key):
        fs.invalidate_cache()
        if not fs.exists(key):
            return False
        is_file = fs.info(key)["type"] != "directory"
    # Not of a folder's empty key alone, as a console makes it.
    return is_file or bool(SharedFolder(str(path), local(path)).there())


def fetched(
    path: str | os.PathLike[str], without: Callable[[str], bool] = lambda name: False
) -> Path:
    """A path as it is; or a local copy of what a URL names, with what has changed since.

    Args:
        without: whether a file, by its name in the folder, is left out.

    Raises:
        StoreError: it is not there, `outgoing` is used for it, or the store cannot be used.
    """
    here, url = local(path), str(path)
    if is_url(url):
        with SharedFolder(url, here) as shared:
            if not shared.there():
                raise StoreError(errno.ENOENT, "is not there", url)
            with shared.reserved():
                shared.download(without=without)
    return here


def is_checkpoint_data(name: str) -> bool:
    """Whether a file of a run, by its name in the folder, belongs to a checkpoint's tensors."""
    return re.search(r"(^|/)checkpoints/[^/]+/(?!manifest\.json$)", name) is not None


def published(
    path: str | os.PathLike[str],
    here: Path | None = None,
    check: Callable[[], None] = lambda: None,
    anew: bool = False,
) -> None:
    """Copy what has changed in a local folder to a URL; does nothing for other paths.

    Files whose names begin with a dot stay here.

    Args:
        here: by default `local(path)`.
        check: called before each file; raises if this process may not write there any more.
        anew: also copy what was copied before and is not there any more.

    Raises:
        StoreError: the store cannot be used.
    """
    here = here or local(path)
    if is_url(path) and here.exists():
        with SharedFolder(str(path), here) as shared:
            if anew:
                shared.compare()
            shared.upload(check)


def taken_up(url: str, here: Path) -> None:
    """Let a run go on in its working folder: with what is there, or else with what the store holds.

    Where the store has what was last copied, the folder is as new or newer, if a run was killed
    or a copy failed. Else another machine has gone on: what was not copied is set aside.
    """
    with SharedFolder(url, here) as shared:
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
    with SharedFolder(url, here) as shared:
        there = shared.there()
        remove(here)
        shared.record.clear()
        shared.record.update({name: {"id": content_id(one)} for name, one in there.items()})


@contextmanager
def continued(path: str | os.PathLike[str]) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield a folder to go on in, and what copies it to the URL that it may stand for.

    That is called at the end, too, also of work that failed, whose errors then name the URL.
    Raises a `StoreError` if another process goes on there.
    """
    if not is_url(path):
        yield local(path), lambda: None
        return
    here = working(str(path))
    lease = Lease(str(path))
    publish = partial(published, path, here, lease.check)
    try:
        taken_up(str(path), here)
        try:
            yield here, publish
        except BaseException as failure:
            # The failure is what the user must see, with the URL that the user wrote.
            _rename(failure, str(here), str(path).rstrip("/"))
            with suppress(OSError):
                publish()
            raise
        publish()
    finally:
        lease.release()


def _rename(failure: BaseException, here: str, url: str) -> None:
    """Let a failure name a URL in place of its local folder."""
    failure.args = tuple(
        one.replace(here, url) if isinstance(one, str) else one for one in failure.args
    )
    # What an `OSError` says is not in its arguments alone.
    if isinstance(failure, OSError) and isinstance(failure.filename, str):
        failure.filename = failure.filename.replace(here, url)


@contextmanager
def outgoing(path: str | os.PathLike[str], overwrite: bool) -> Iterator[Path]:
    """Yield a path to write to, which is published if it stands for a URL.

    Raises:
        StoreError: it is already there and may not be replaced, another process writes it, or the
            store cannot be used.
    """
    here, check = local(path), lambda: None
    with ExitStack() as until_published:
        if is_url(path):
            with SharedFolder(str(path), here) as shared:
                until_published.enter_context(shared.reserved())
            lease = Lease(str(path))
            until_published.callback(lease.release)
            check = lease.check
            with SharedFolder(str(path), here) as shared:
                there = shared.there()
                # A copy of what is whole here, which was cut off, and nothing else.
                is_part = bool(there) and not overwrite and not any(map(counts, there))
                is_part = is_part and any(n and counts(n) for n in shared.files())
                is_part = is_part and shared.is_ours(there)
                if there and not (overwrite or is_part):
                    reason = "is already there; write another name, or delete it first"
                    raise StoreError(errno.EEXIST, reason, str(path))
                # Who replaces a folder looks at what it holds.
                is_folder = bool(there) and "" not in there and not is_part
                if is_folder:
                    shared.download()
            if not is_folder:
                forgotten(str(path), here)
        yield here
        published(path, check=check)
