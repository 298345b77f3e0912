"""Writes the arrays of a part as `.npy` files of a limited number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from stampede.data.prepared.manifest import ShardEntry, ShardFile
from stampede.files import file_entry, sync

# Criteo: 440 MB of ids in a file. Checksums of whole files are made while the next are written.
SHARD_ROWS = 1 << 22


class _NpyFile:
    """An array that grows at its end; its header is written last."""

    def __init__(self, path: Path, row: np.ndarray) -> None:
        """`row` is an array `[any, ...]` of the shape and type of the rows."""
        self._path = path
        self._row = row[:0]
        self._rows = 0
        self._file: BinaryIO = path.open("wb")
        # numpy leaves room in a header for the first dimension to grow.
        self._header()
        self._begin = self._file.tell()

    def append(self, rows: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(rows, dtype=self._row.dtype).data)
        self._rows += len(rows)

    def close(self) -> Path:
        self._file.seek(0)
        self._header()
        assert self._file.tell() == self._begin
        self._file.close()
        sync(self._path)
        return self._path

    def _header(self) -> None:
        described = {
            "descr": np.lib.format.dtype_to_descr(self._row.dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._row.shape[1:]),
        }
        np.lib.format.write_array_header_1_0(self._file, described)


class PartWriter:
    """Writes a part shard by shard.

    Args:
        folder: where the files go.
        part: its name, which the files' names begin with.
        shard_rows: rows of a whole shard.
    """

    def __init__(self, folder: Path, part: str, shard_rows: int = SHARD_ROWS) -> None:
        self._folder = folder
        self._part = part
        self._shard_rows = shard_rows
        self._files: dict[str, _NpyFile] = {}
        self._ends: dict[int, int] = {}
        self._rows = 0
        self._closed: list[tuple[int, dict[str, Future[ShardFile]]]] = []
        # Files are flushed and checksums made while the next rows are prepared.
        self._threads = ThreadPoolExecutor(2)

    def append(
        self,
        arrays: Mapping[str, np.ndarray],
        bags: list[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Write some rows.

        Args:
            arrays: by name, `[n, ...]` each.
            bags: of each multi-valued field, lengths `[n]` and values.
        """
        rows = len(next(iter(arrays.values())))
        starts = [np.concatenate([[0], np.cumsum(lengths)]) for lengths, _ in bags]
        done = 0
        while done < rows:
            stop = min(rows, done + self._shard_rows - self._rows)
            for name, array in arrays.items():
                self._file(name, array).append(array[done:stop])
            for i, (_, values) in enumerate(bags):
                self._append_bag(i, starts[i][done : stop + 1], values)
            self._rows += stop - done
            done = stop
            if self._rows == self._shard_rows:
                self._close_shard()

    def close(self) -> None:
        """Begin to close the last shard; does not wait for it."""
        if self._rows:
            self._close_shard()

    def finish(self) -> list[ShardEntry]:
        """Close the last shard; what the manifest says about all of them."""
        self.close()
        shards = [
            ShardEntry(rows=rows, files={name: entry.result() for name, entry in entries.items()})
            for rows, entries in self._closed
        ]
        self._threads.shutdown()
        return shards

    def _append_bag(self, i: int, starts: np.ndarray, values: np.ndarray) -> None:
        """Add values `starts[0]` to `starts[-1]`, and where each row's end in the shard."""
        offsets = self._file(f"offsets_{i}", starts)
        end = self._ends.get(i)
        if end is None:
            offsets.append(np.zeros(1, dtype=np.int64))
            end = 0
        offsets.append(starts[1:] - starts[0] + end)
        self._file(f"values_{i}", values).append(values[starts[0] : starts[-1]])
        self._ends[i] = end + int(starts[-1] - starts[0])

    def _file(self, name: str, array: np.ndarray) -> _NpyFile:
        if name not in self._files:
            path = self._folder / f"{self._part}-{len(self._closed):05d}-{name}.npy"
            self._files[name] = _NpyFile(path, array)
        return self._files[name]

    def _close_shard(self) -> None:
        entries = {
            name: self._threads.submit(_closed, file, self._folder)
            for name, file in self._files.items()
        }
        self._closed.append((self._rows, entries))
        self._files, self._ends, self._rows = {}, {}, 0


def _closed(file: _NpyFile, folder: Path) -> ShardFile:
    return shard_file(file.close(), folder)


def shard_file(path: Path, folder: Path) -> ShardFile:
    """What the manifest says of a file of a shard that is closed."""
    entry = file_entry(path, folder)
    return ShardFile(**entry.model_dump(), mtime_ns=path.stat().st_mtime_ns)
