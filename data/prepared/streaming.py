"""Prepared data in an object store: rows are fetched before they are read, and dropped again."""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

import numpy as np
import torch
from torch import Tensor

from stampede import stores
from stampede.data.order import BLOCK_ROWS
from stampede.data.prepared.manifest import Manifest, PartName
from stampede.data.prepared.reader import Shard, ShardedPart, open_part
from stampede.data.samples import Samples

# Nearly all of the data. Labels, weights and offsets are some bytes a row and are read as a whole
# before training.
_STREAMED = re.compile(r"(^|-)(ids|numbers|values_\d+|weights_\d+)(\.npy)?$")

# Rows that come and go together. Those of a single-valued field fill whole pages.
_CHUNK = 1024

# Chunks of a request. With Criteo's columns 2.5 MB, much longer than 20 ms at 100 MB/s.
_MOST_CHUNKS = 16

_THREADS = 8

_ABSENT, _COMING, _HERE = range(3)


def is_streamed(name: str) -> bool:
    """Whether an array, or its file in a prepared folder, is fetched by rows."""
    return _STREAMED.search(name) is not None


def make_files(place: Path, manifest: Manifest) -> None:
    """Make the empty files that the processes of a host share, see `open_streamed`.

    Raises a `StoreError` if their disk frees no parts of files.
    """
    place.mkdir(parents=True)
    with (place / "hole").open("w+b") as file:
        file.truncate(mmap.PAGESIZE)
        _free(mmap.mmap(file.fileno(), 0), file.name, 0, mmap.PAGESIZE)
    for part, shards in manifest.parts.items():
        chunks = -(-sum(shard.rows for shard in shards) // _CHUNK)
        sizes = {"states": chunks, "claims": 0, "reads": 0}
        # With room for the headers, which are left out.
        sizes |= {
            name: sum(shard.files[name].bytes for shard in shards)
            for name in filter(is_streamed, manifest.arrays())
        }
        for name, size in sizes.items():
            with (place / f"{part}-{name}").open("wb") as file:
                file.truncate(size)


def open_streamed(
    url: str, place: Path, room: float, folder: Path, manifest: Manifest, part: PartName
) -> StreamedPart:
    """A part of the prepared data of a URL; raises as `open_part`.

    Args:
        place: of the files of `make_files`. It may be deleted once all processes have opened it:
            the system frees the files when these end, even if they are killed.
        room: bytes that the rows of all parts may take here; half of them are for the training.
        folder: with all files but those that are streamed.
    """
    small = open_part(folder, manifest, part, lambda name: not is_streamed(name))
    share = 2 if part == "train" else 4
    cache = _Cache(url, place, room / share, manifest, part, small.shards)
    return StreamedPart(tuple(map(cache.with_arrays, range(len(small.shards)))), cache=cache)


@dataclass(frozen=True)
class StreamedPart(ShardedPart):
    """A part of which only some rows are here; reading waits for those that it needs.

    `before` rows of the part in the store come before the first shard.
    """

    before: int = 0
    cache: _Cache | None = None

    def read(self, rows: Tensor) -> Samples:
        """See `Part`. Raises a `StoreError` if rows cannot be fetched."""
        with self.cache.holding(self._chunks(rows.numpy())):
            return super().read(rows)

    def last(self, rows: int) -> StreamedPart:
        """The last so many of its rows, which are at least one."""
        part = super().last(rows)
        cut = self.shards[: len(self.shards) - len(part.shards)]
        return replace(part, before=self.before + sum(shard.rows for shard in cut))

    def fetch_ahead(self, ranges: np.ndarray) -> None:
        """Begin to fetch ranges of rows, `[n, 2]` first and one past the last."""
        self.cache.fetch_ahead(self._chunks_of(ranges))

    def make_room(self, coming: np.ndarray, kept: np.ndarray) -> None:
        """Drop rows until ranges of others have room, but none of the `kept` ones."""
        self.cache.make_room(self._chunks_of(coming), self._chunks_of(kept))

    def _chunks(self, rows: np.ndarray) -> np.ndarray:
        return np.unique((rows + (self.before + self.skipped)) // _CHUNK)

    def _chunks_of(self, ranges: np.ndarray) -> np.ndarray:
        rows = [np.append(np.arange(*one, _CHUNK), one[1] - 1) for one in ranges.tolist()]
        return self._chunks(np.concatenate([np.empty(0, np.int64), *rows]))


class _Cache:
    """A part's streamed arrays, each in a sparse file, and which chunks of rows are in them."""

    def __init__(
        self,
        url: str,
        place: Path,
        room: float,
        manifest: Manifest,
        part: PartName,
        small: Sequence[Shard],
    ) -> None:
        self._url, self._shards, self._small = url, manifest.parts[part], small
        self._starts = np.cumsum([0, *(shard.rows for shard in small)])
        self._arrays = {
            name: _Array(place / f"{part}-{name}", name, manifest, small)
            for name in filter(is_streamed, manifest.arrays())
        }
        with (place / f"{part}-states").open("r+b") as file:
            self._states = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        size = sum(array.bytes for array in self._arrays.values()) / len(self._states)
        # A block of an array begins and ends within pages.
        size += 2 * mmap.PAGESIZE * len(self._arrays) * _CHUNK / BLOCK_ROWS
        self._most_chunks = room / size
        # When each chunk was last asked for; only other processes have asked for those of infinity.
        self._asked = np.full(len(self._states), np.inf)
        self._claims = _FileLock(place / f"{part}-claims")
        self._reads = _FileLock(place / f"{part}-reads")
        # Daemons, as a process that ends must not fetch what was asked for.
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        for _ in range(_THREADS):
            Thread(target=_work, args=(self._tasks,), daemon=True).start()
        weakref.finalize(self, _end, self._tasks)

    def with_arrays(self, at: int) -> Shard:
        """A shard with its streamed arrays too."""
        arrays = {name: torch.from_numpy(one.of_shard(at)) for name, one in self._arrays.items()}
        return replace(self._small[at], arrays={**self._small[at].arrays, **arrays})

    @contextmanager
    def holding(self, chunks: np.ndarray) -> Iterator[None]:
        """Have chunks here, and keep them here within the context."""
        self._asked[chunks] = time.monotonic()
        while True:
            with self._reads.held(fcntl.LOCK_SH):
                if (self._states[chunks] == _HERE).all():
                    yield
                    return
            self._fetch_all(self._claimed(chunks))
            # Others are being fetched by another thread or process.
            while (self._states[chunks] == _COMING).any():
                time.sleep(0.002)

    def fetch_ahead(self, chunks: np.ndarray) -> None:
        """Begin to fetch chunks."""
        self._asked[chunks] = time.monotonic()
        for run in self._claimed(chunks):
            self._tasks.put(partial(self._fetch, run))

    def make_room(self, coming: np.ndarray, kept: np.ndarray) -> None:
        """Drop chunks, those asked for the longest ago first, until the coming ones have room."""
        with self._claims.held(), self._reads.held():
            needed = np.count_nonzero(self._states) + np.count_nonzero(
                self._states[coming] == _ABSENT
            )
            old = np.setdiff1d(np.flatnonzero(self._states == _HERE), np.union1d(coming, kept))
            old = old[np.argsort(self._asked[old], kind="stable")]
            gone = np.sort(old[: max(math.ceil(needed - self._most_chunks), 0)])
            self._states[gone] = _ABSENT
            # Whole stretches, as pages may be shared with what went before.
            for first, last in _runs(np.flatnonzero(self._states == _ABSENT)):
                if np.searchsorted(gone, first) < np.searchsorted(gone, last):
                    for array in self._arrays.values():
                        array.free(*(array.position(*self._place(one)) for one in (first, last)))

    def _claimed(self, chunks: np.ndarray) -> list[tuple[int, int]]:
        """Stretches of those that are absent, which this process has to fetch."""
        with self._claims.held():
            chunks = chunks[self._states[chunks] == _ABSENT]
            self._states[chunks] = _COMING
        return list(_runs(chunks, _MOST_CHUNKS))

    def _place(self, chunk: int) -> tuple[int, int]:
        """The shard in which a chunk begins, and the row there; the last one ends with the part."""
        row = min(chunk * _CHUNK, int(self._starts[-1]))
        shard = min(int(np.searchsorted(self._starts, row, "right")), len(self._shards)) - 1
        return shard, row - int(self._starts[shard])

    def _fetch_all(self, runs: list[tuple[int, int]]) -> None:
        """Fetch stretches that were claimed; after a failure the rest is absent again."""
        with ThreadPoolExecutor(_THREADS) as threads:
            tasks = [threads.submit(self._fetch, run) for run in runs]
            wait(tasks, return_when=FIRST_EXCEPTION)
            for task, (first, last) in zip(tasks, runs, strict=True):
                if task.cancel():
                    self._states[first:last] = _ABSENT
        for task in tasks:
            if not task.cancelled():
                task.result()

    def _fetch(self, chunks: tuple[int, int]) -> None:
        """Fetch chunks that were claimed."""
        state = _ABSENT
        try:
            (shard, row), (last, end) = map(self._place, chunks)
            while shard <= last:
                stop = end if shard == last else self._shards[shard].rows
                for name, array in self._arrays.items():
                    entry = self._shards[shard].files[name]
                    array.fetch(f"{self._url}/{entry.name}", entry.bytes, shard, row, stop)
                shard, row = shard + 1, 0
            state = _HERE
        finally:
            self._states[chunks[0] : chunks[1]] = state


class _Array:
    """A streamed array: the rows of all shards, without their headers, in a sparse file."""

    def __init__(self, path: Path, name: str, manifest: Manifest, shards: Sequence[Shard]) -> None:
        kind, _, field = name.partition("_")
        types = {"ids": manifest.ids_dtype, "values": manifest.ids_dtype}
        types |= {"numbers": manifest.numbers_dtype, "weights": "float32"}
        columns = {"ids": [len(manifest.single())], "numbers": [len(manifest.numbers)]}
        self._offsets = [shard.maps[f"offsets_{field}"] for shard in shards] if field else None
        lengths = [self._count(at, shard.rows) for at, shard in enumerate(shards)]
        # Elements before each shard.
        self._ends = np.cumsum([0, *lengths])
        shape, dtype = [int(self._ends[-1]), *columns.get(kind, [])], np.dtype(types[kind])
        self._width = dtype.itemsize * math.prod(shape[1:])
        self._file = path.open("r+b", buffering=0)
        self._map = mmap.mmap(self._file.fileno(), 0)
        self._array = np.frombuffer(self._map, dtype, math.prod(shape)).reshape(shape)

    @property
    def bytes(self) -> int:
        """Of all rows."""
        return int(self._ends[-1]) * self._width

    def of_shard(self, at: int) -> np.ndarray:
        """The array of a shard."""
        return self._array[self._ends[at] : self._ends[at + 1]]

    def position(self, shard: int, row: int) -> int:
        """Where a row of a shard begins in the file, in bytes."""
        return (int(self._ends[shard]) + self._count(shard, row)) * self._width

    def fetch(self, url: str, size: int, shard: int, row: int, stop: int) -> None:
        """Fetch rows of a shard, whose file in the store has so many bytes."""
        begin, end = self.position(shard, row), self.position(shard, stop)
        # The header comes first, so counted from the end.
        after = size - int(self._ends[shard + 1]) * self._width
        data = stores.read_range(url, after + begin, after + end) if begin < end else b""
        if len(data) != end - begin:
            raise stores.StoreError(errno.EIO, "has changed while it was read; begin again", url)
        with stores.asking(url):
            while data:
                written = os.pwrite(self._file.fileno(), data, begin)
                begin, data = begin + written, data[written:]

    def free(self, begin: int, end: int) -> None:
        """Give the whole pages between two positions back."""
        _free(self._map, str(self._file.name), begin, end)

    def _count(self, shard: int, row: int) -> int:
        """Elements of the first rows of a shard."""
        return row if self._offsets is None else int(self._offsets[shard][row])


class _FileLock:
    """A lock among the threads and processes that have opened a file."""

    def __init__(self, path: Path) -> None:
        self._file, self._thread = path.open("r+b"), Lock()

    @contextmanager
    def held(self, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Hold it alone, or with other processes (`LOCK_SH`)."""
        with self._thread:
            fcntl.flock(self._file, kind)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def _free(mapped: mmap.mmap, name: str, begin: int, end: int) -> None:
    """Give the whole pages between two positions of a file back to its disk."""
    first, last = -(-begin // mmap.PAGESIZE), end // mmap.PAGESIZE
    if first < last:
        stretch = first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE
        try:
            mapped.madvise(mmap.MADV_REMOVE, *stretch)
        except OSError as failure:
            reason = "its disk frees no parts of files; set $STAMPEDE_STORES to another disk"
            raise stores.StoreError(failure.errno, reason, name) from None


def _work(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        # Whoever reads the rows tries again, and tells.
        with suppress(Exception):
            task()
        del task


def _end(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    for _ in range(_THREADS):
        tasks.put(None)


def _runs(chunks: np.ndarray, most: int = 1 << 62) -> Iterator[tuple[int, int]]:
    """Stretches of ascending numbers, of at most so many: the first and one past the last."""
    for stretch in np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1):
        for at in range(0, len(stretch), most):
            yield int(stretch[at]), int(stretch[min(at + most, len(stretch)) - 1]) + 1
