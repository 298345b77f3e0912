"""Sorting within a memory budget: sorted runs in an unnamed file, merged range by range."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

# Records that consumers get at a time: what they compute from them stays in the caches, and small
# beside any budget.
CHUNK = 1 << 17

# Records of a run between two that are remembered, as a share of the budget. Ranges of half of the
# budget then keep to it up to so many runs over two.
_INDEX = 4096

# Peak memory of a record in bytes, by its columns: one is sorted in place, two through an order.
PEAK_BYTES = {1: 8, 2: 44}


class _Run(NamedTuple):
    """A sorted run in the file.

    Attributes:
        offset: of its first byte.
        size: number of its records.
        index: `[columns, n]`, its first record and each that is a further `step` on.
    """

    offset: int
    size: int
    index: np.ndarray


class ExternalSort:
    """Sorts records of one or two unsigned 64-bit numbers, the first one deciding first.

    What does not fit into `capacity` records is kept in a file without a name: nothing of it is
    left behind in whatever way the process ends.

    Args:
        columns: numbers of a record, 1 or 2.
        capacity: records in memory, `PEAK_BYTES` each.
        scratch: folder for the file; default: the system's for temporary files.
    """

    def __init__(self, columns: int, capacity: int, scratch: Path | None = None) -> None:
        self._buffer: np.ndarray | None = np.empty((columns, capacity), np.uint64)
        self._capacity = capacity
        self._step = max(1, capacity // _INDEX)
        self._scratch = scratch
        self._held = 0
        self._runs: list[_Run] = []
        self._file: BinaryIO | None = None

    def add(self, records: np.ndarray) -> None:
        """Take records, `[columns, n]` uint64.

        Raises:
            OSError: the file cannot be written.
        """
        while records.shape[1]:
            if self._held == self._capacity:
                self._spill()
            taken = min(self._capacity - self._held, records.shape[1])
            self._buffer[:, self._held : self._held + taken] = records[:, :taken]
            self._held += taken
            records = records[:, taken:]

    def sorted(self) -> Iterator[np.ndarray]:
        """All records in ascending order, `[columns, up to CHUNK]` each; once, and none empty.

        Raises:
            OSError: the file cannot be written or read.
        """
        if self._runs:
            self._spill()
            self._buffer = None
            pieces = self._merged()
        else:
            pieces = iter([_sort(self._buffer[:, : self._held])])
        for piece in pieces:
            for start in range(0, piece.shape[1], CHUNK):
                yield piece[:, start : start + CHUNK]
        self.close()

    def close(self) -> None:
        """Free memory and file."""
        self._buffer = None
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        """Write the records in memory as a sorted run."""
        records = _sort(self._buffer[:, : self._held])
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115
        offset = self._file.seek(0, 2)
        for column in records:
            self._file.write(column)
        # A full disk is to be known here, not when the file is closed.
        self._file.flush()
        self._runs.append(_Run(offset, self._held, records[:, :: self._step].copy()))
        self._held = 0

    def _merged(self) -> Iterator[np.ndarray]:
        """Ranges of the records of all runs, in ascending order."""
        sizes = [run.size for run in self._runs]
        before = [0] * len(self._runs)
        for after in [*self._cuts(), sizes]:
            counts = [stop - start for start, stop in zip(before, after, strict=True)]
            records = np.empty((len(self._runs[0].index), sum(counts)), np.uint64)
            filled = 0
            for run, start, count in zip(self._runs, before, counts, strict=True):
                self._read(run, start, records[:, filled : filled + count])
                filled += count
            before = after
            if filled:
                yield _sort(records)
            # Freed before the next range is read.
            del records

    def _cuts(self) -> Iterator[list[int]]:
        """Positions in all runs that divide the merged records into ranges.

        Equal records come in the order of their runs, so that even a part in which all are equal
        is divided.
        """
        index = np.concatenate([run.index for run in self._runs], axis=1)
        owner = np.repeat(range(len(self._runs)), [run.index.shape[1] for run in self._runs])
        position = np.concatenate([np.arange(run.index.shape[1]) for run in self._runs])
        order = np.lexsort((position, owner, *index[::-1]))
        distance = max(1, self._capacity // 2 // self._step)
        for entry in order[distance::distance]:
            yield [
                int(position[entry]) * self._step
                if number == owner[entry]
                else self._find(run, index[:, entry], "right" if number < owner[entry] else "left")
                for number, run in enumerate(self._runs)
            ]

    def _find(self, run: _Run, record: np.ndarray, side: str) -> int:
        """How many records of a run come before one."""
        entry = _position(run.index, record, side)
        if entry == 0:
            return 0
        start = (entry - 1) * self._step
        count = min(self._step, run.size - start)
        block = np.empty((len(run.index), count), np.uint64)
        self._read(run, start, block)
        return start + _position(block, record, side)

    def _read(self, run: _Run, start: int, records: np.ndarray) -> None:
        """Fill `[columns, n]` with the records of a run from `start` on."""
        for number, column in enumerate(records):
            self._file.seek(run.offset + 8 * (number * run.size + start))
            if self._file.readinto(column) != column.nbytes:
                raise OSError("the file of sorted scores was cut short")


def _sort(records: np.ndarray) -> np.ndarray:
    """Sort in place; returns the same."""
    if len(records) == 1:
        records[0].sort()
        return records
    order = _order(*records)
    for column in records:
        column[:] = column[order]
    return records


def _order(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """As `numpy.lexsort((second, first))`, in 0.6 of its time where ids take up to 32 bits."""
    order = np.argsort(second)
    largest = int(first.max(initial=0))
    # Of 16 bits numpy makes a radix sort.
    for shift in range(0, largest.bit_length(), 16):
        digits = (first >> np.uint64(shift)).astype(np.uint16)[order]
        order = order[np.argsort(digits, kind="stable")]
    return order


def _position(records: np.ndarray, record: np.ndarray, side: str) -> int:
    """Where a record belongs among sorted ones; as `numpy.searchsorted`."""
    low, high = 0, records.shape[1]
    for column, value in zip(records[:-1], record[:-1], strict=True):
        within = column[low:high]
        low, high = (
            low + int(np.searchsorted(within, value, "left")),
            low + int(np.searchsorted(within, value, "right")),
        )
    return low + int(np.searchsorted(records[-1, low:high], record[-1], side))
