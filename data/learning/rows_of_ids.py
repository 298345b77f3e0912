"""Finds the rows of ids by their hashes, in memory or in a file that processes share."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import polars as pl

# The first rows of a table; the ids of the vocabulary follow.
MISSING_ROW, UNSEEN_ROW, FIRST_ROW = 0, 1, 2

# Hashes are sorted in so many parts, one after the other: the lowest hash of each.
_BUCKETS = 64
_LOWEST = np.arange(_BUCKETS, dtype=np.uint64) * np.uint64(2**64 // _BUCKETS)


class RowsOfIds:
    """Finds the rows of ids, String or null: `[n]` int64.

    It keeps a 64-bit hash of each id and its row, 16 bytes, not the text. An unseen id shares the
    hash of a known one with a probability of size / 2^64.

    Args:
        pieces: the ids in the order of their rows, in parts; it is read twice, or more often where
            hashes of two ids are equal.
        file: keeps hashes and rows there, for the other processes of the machine too. What one of
            them has written is read; files of other versions of Polars, whose hashes differ, are
            left alone.
    """

    def __init__(self, pieces: Iterable[pl.Series], file: Path | None = None) -> None:
        made = None
        if file is not None:
            file = file.with_name(f"{file.name}-{pl.__version__}-{platform.machine()}.npy")
            if file.exists():
                self._table = np.load(file, mmap_mode="r")
                return
            made = file.with_name(f"{uuid4().hex}.npy")
        seed = 0
        while not self._fill(pieces, seed, made):
            seed += 1
        if file is not None and made is not None:
            # Complete at once for others, which may be about to write it too.
            os.replace(made, file)

    @property
    def size(self) -> int:
        """Number of known ids."""
        return self._table.shape[1] - 1

    @property
    def _seed(self) -> int:
        return int(self._table[0, 0])

    def _fill(self, pieces: Iterable[pl.Series], seed: int, file: Path | None) -> bool:
        """Sort the hashes, bucket by bucket; whether each occurs once."""
        edges, first, ends = [], FIRST_ROW, np.zeros(_BUCKETS, np.int64)
        for hashes in _hashes(pieces, seed):
            hashes.sort()
            edges.append(np.append(np.searchsorted(hashes, _LOWEST), len(hashes)))
            ends += np.diff(edges[-1])
        # The first column is the seed.
        self._table = _array((2, 1 + int(ends.sum())), file)
        self._table[:, 0] = seed
        found, rows = self._table[:, 1:]
        place = np.cumsum(ends) - ends
        for hashes, edge in zip(_hashes(pieces, seed), edges, strict=True):
            order = np.argsort(hashes)
            hashes, order = hashes[order], (order + first).astype(np.uint64)
            first += len(hashes)
            for bucket in np.flatnonzero(np.diff(edge)):
                begin, end = edge[bucket : bucket + 2]
                at = slice(place[bucket], place[bucket] + end - begin)
                found[at], rows[at] = hashes[begin:end], order[begin:end]
                place[bucket] += end - begin
        ends = np.cumsum(ends)
        for begin, end in zip([0, *ends], ends, strict=False):
            order = np.argsort(found[begin:end])
            rows[begin:end] = rows[begin:end][order]
            found[begin:end] = hashes = found[begin:end][order]
            if (hashes[1:] == hashes[:-1]).any():
                return False
        return True

    def __call__(self, ids: pl.Series) -> np.ndarray:
        """The row of each id."""
        found, rows = self._table[:, 1:]
        asked = ids.hash(self._seed).to_numpy()
        answer = np.full(len(asked), UNSEEN_ROW, np.int64)
        if len(found):
            # In order, so that the table is read from its beginning to its end.
            order = np.argsort(asked)
            asked = asked[order]
            place = np.searchsorted(found, asked)
            is_known = found.take(place, mode="clip") == asked
            answer[order] = np.where(is_known, rows.take(place, mode="clip"), UNSEEN_ROW)
        if ids.null_count():
            answer[ids.is_null().to_numpy()] = MISSING_ROW
        return answer


def _hashes(pieces: Iterable[pl.Series], seed: int) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield piece.hash(seed).to_numpy().copy()


def _array(shape: tuple[int, int], file: Path | None) -> np.ndarray:
    """Unsigned 64-bit integers in memory or in a new file."""
    if file is None:
        return np.empty(shape, np.uint64)
    file.parent.mkdir(parents=True, exist_ok=True)
    made = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint64, shape=shape)
    if hasattr(os, "posix_fallocate"):
        # A write into a mapped file ends the process if the disk is full.
        with file.open("r+b") as taken:
            os.posix_fallocate(taken.fileno(), 0, file.stat().st_size)
    return made
