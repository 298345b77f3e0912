# pyright: basic
"""HDFS as a store among others: a file is there as a whole, or not at all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any
from uuid import uuid4

from fsspec.spec import AbstractBufferedFile
from hdfs_native.fsspec import HdfsFileSystem

# The driver asks a name node that is not there for three minutes and some seconds.
_SECONDS = 240.0


class _Answered:
    """A part of the driver, whose calls end: the driver waits for a silent server for ever."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._inner, name)

        def call(*given: Any) -> Any:
            found = _answer(called, *given)
            if hasattr(found, "__next__"):
                return iter(_answer(list, found))
            # What reads or writes a file asks the servers on.
            return _Answered(found) if type(found).__name__.startswith("Raw") else found

        return call


def _answer(called: Callable[..., Any], *given: Any) -> Any:
    """What a call returns. Raises a TimeoutError after a while; its thread stays."""
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(called(*given))
        except BaseException as failure:
            result.set_exception(failure)

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    if thread.is_alive():
        raise TimeoutError(f"it has not answered for {_SECONDS:.0f} s")
    return result.result()


def _raised(failure: OSError) -> None:
    if not isinstance(failure, FileNotFoundError):
        raise failure


class WholeFiles(HdfsFileSystem):
    """Files get their name when they are complete; HDFS shows them as they grow."""

    def __init__(self, *given: Any, **options: Any) -> None:
        """Connect to the name node with the first request."""
        super().__init__(*given, **options)
        client: Any = self.client
        client.inner = _Answered(client.inner)

    @classmethod
    def of(cls, url: str) -> tuple[WholeFiles, str]:
        """The file system that a URL names, and the path within it."""
        host, _, port = url.removeprefix("hdfs://").partition("/")[0].partition(":")
        if "@" in host:
            raise ValueError("write the name of the user into $HADOOP_USER_NAME")
        try:
            return cls(host or None, int(port) if port else None), cls._strip_protocol(url)
        except Exception as failure:
            if "No NameNode hosts found" not in str(failure):
                raise
            reason = f"write the port of {host or 'the name node'}, or set $HADOOP_CONF_DIR"
            raise ValueError(reason) from None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        # The driver's own takes ? and # for the end of a path.
        path = re.sub(r"^hdfs://[^/]*", "", str(path))
        return re.sub("/+", "/", path).rstrip("/") or cls.root_marker

    def walk(self, path: str, *given: Any, on_error: Any = _raised, **options: Any) -> Any:
        """As fsspec's, where a folder that cannot be listed seems to be empty."""
        return super().walk(path, *given, on_error=on_error, **options)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """The bytes of a file, or those from `start` to `end - 1`, without reading ahead."""
        there, begin = self.client.read(self._strip_protocol(path)), start or 0
        until = len(there) if end is None else min(end, len(there))
        return there.read_range(begin, max(until - begin, 0))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        path = self._strip_protocol(path)
        return _Reader(self, path, **options) if mode == "rb" else super()._open(path, mode)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        """Copy a local file. What a killed process leaves is replaced by the next copy."""
        with open(lpath, "rb") as here, self._unnamed(rpath, "copy", True) as there:
            shutil.copyfileobj(here, there, 1 << 20)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write a file; with `mode` "create" a FileExistsError is raised where it is there."""
        with self._unnamed(path, uuid4().hex, mode == "overwrite") as there:
            there.write(value)

    @contextmanager
    def _unnamed(self, path: str, suffix: str, overwrite: bool) -> Iterator[Any]:
        parent, _, name = self._strip_protocol(path).rpartition("/")
        unnamed = f"{parent}/.{name}.{suffix}"
        try:
            # Makes the folder, too.
            with self.open(unnamed, "wb") as file:
                yield file
            self.mv(unnamed, f"{parent}/{name}", overwrite=overwrite)
        except TimeoutError:
            # Who is silent would be waited for again.
            raise
        except BaseException:
            with suppress(Exception):
                self.rm_file(unnamed)
            raise


class _Reader(AbstractBufferedFile):
    """A file that is read in blocks, as of other stores; the driver's own cannot be buffered."""

    def __init__(self, fs: WholeFiles, path: str, block_size: Any, **options: Any) -> None:
        self._there = fs.client.read(path)
        options["size"] = len(self._there)
        super().__init__(fs, path, "rb", block_size or "default", **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._there.read_range(start, end - start)
