# pyright: basic
"""HDFS as a store among others: a file is there as a whole, or not at all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO
from uuid import uuid4

from fsspec.spec import AbstractBufferedFile
from hdfs_native.fsspec import HdfsFileSystem


class WholeFiles(HdfsFileSystem):
    """Files get their name when they are complete; HDFS shows them as they grow."""

    @classmethod
    def of(cls, url: str) -> tuple[WholeFiles, str]:
        """The file system that a URL names, and the path within it."""
        return cls(**cls._get_kwargs_from_urls(url)), cls._strip_protocol(url)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        # The driver's own takes ? and # for the end of a path.
        return re.sub(r"^hdfs://[^/]*", "", str(path)).rstrip("/") or cls.root_marker

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        path = self._strip_protocol(path)
        return _Reader(self, path, **options) if mode == "rb" else super()._open(path, mode)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        """Copy a local file."""
        with open(lpath, "rb") as here, self._unnamed(rpath, True) as there:
            shutil.copyfileobj(here, there, 1 << 20)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write a file; with `mode` "create" a FileExistsError is raised where it is there."""
        with self._unnamed(path, mode == "overwrite") as there:
            there.write(value)

    @contextmanager
    def _unnamed(self, path: str, overwrite: bool) -> Iterator[BinaryIO]:
        parent, _, name = self._strip_protocol(path).rpartition("/")
        unnamed = f"{parent}/.{name}.{uuid4().hex}"
        try:
            # Makes the folder, too.
            with self.open(unnamed, "wb") as file:
                yield file
            self.mv(unnamed, f"{parent}/{name}", overwrite=overwrite)
        except BaseException:
            with suppress(Exception):
                self.rm_file(unnamed)
            raise


class _Reader(AbstractBufferedFile):
    """A file that is read in blocks, as of other stores; the driver's own cannot be buffered."""

    def __init__(self, fs: WholeFiles, path: str, block_size: int | None, **options: Any) -> None:
        self._there = fs.client.read(path)
        options["size"] = len(self._there)
        super().__init__(fs, path, "rb", block_size or "default", **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._there.read_range(start, end - start)
