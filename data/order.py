"""Which rows an epoch visits when: computed from seed, epoch and position, never stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stampede.data.permutation import Integers, Permutation

Shuffle = Literal["global", "block", "none"]

# Rows of a block, 2.5 MB of Criteo's: long enough that a disk reads at nearly its full speed.
BLOCK_ROWS = 1 << 14

# What follows seed and epoch in the keys of the permutations, so that each draws on its own.
_WHOLE, _BLOCKS, _WINDOW, _SHIFT = range(4)


@dataclass(frozen=True)
class Order:
    """The order of a part's rows in each epoch.

    `global`: every order is possible. `block`: blocks of `block_rows` rows that stand together on
    disk come in random order; so many of them as make a window are mixed row by row, then the next.
    A batch needs the window it is in, and the next where it reaches into that. Where blocks begin
    differs from epoch to epoch; they go round from the last row to the first, and what is left
    after the last whole block is read last.
    `none`: from the first to the last row.

    An epoch visits every row once.

    Attributes:
        rows: of the part.
        shuffle: how they are mixed.
        seed: of all epochs.
        window_rows: rows of a window of `block`, a multiple of `block_rows`; windows of `none` say
            only what is read ahead. 0: the whole part.
        block_rows: rows of a block, a power of two.
    """

    rows: int
    shuffle: Shuffle = "none"
    seed: int = 0
    window_rows: int = 0
    block_rows: int = BLOCK_ROWS

    def __post_init__(self) -> None:
        if self.block_rows & (self.block_rows - 1) or self.block_rows < 1:
            raise ValueError(f"block_rows: found {self.block_rows}; write a power of two")
        if self.window_rows < 0 or self.window_rows % self.block_rows:
            raise ValueError(
                f"window_rows: found {self.window_rows}; write a multiple of {self.block_rows}"
            )

    def rows_at(
        self,
        epoch: int,
        start: int,
        stop: int,
        count: Callable[[int, int], Integers] = np.arange,
    ) -> Integers:
        """The rows at the positions `start` to `stop - 1` of an epoch.

        Args:
            count: makes the positions, int64: `np.arange`, or torch's on some device.

        Returns:
            `[stop - start]` int64, of the kind that `count` makes.
        """
        positions = count(start, stop)
        if self.shuffle == "none" or stop == start:
            return positions
        if self.shuffle == "global":
            return Permutation(self.rows, (self.seed, epoch, _WHOLE))(positions)
        return self._mixed_blocks(epoch, start, stop, positions, count)

    def _mixed_blocks(
        self, epoch: int, start: int, stop: int, rows: Integers, count: Callable[..., Integers]
    ) -> Integers:
        """Rows at the positions that `rows` holds, written over them."""
        bits = self.block_rows.bit_length() - 1
        for number in range(start // self.window, (stop - 1) // self.window + 1):
            first = number * self.window
            last = min(first + self.window, self.rows)
            here = slice(max(start, first) - start, min(stop, last) - start)
            slots = Permutation(last - first, (self.seed, epoch, _WINDOW, number))(
                rows[here] - first
            )
            # Shifts: a division of 64 bits takes as long as all the rest.
            blocks = self._block_at(epoch, count(first >> bits, -(-last >> bits)))
            rows[here] = (blocks[slots >> bits] << bits) + (slots & (self.block_rows - 1))
        return self._turned(epoch, rows)

    def _block_at(self, epoch: int, places: Integers) -> Integers:
        """Numbers of the blocks at the given places of the epoch's order of blocks."""
        whole = self.rows // self.block_rows
        if not whole:
            return places
        ragged = places == whole
        blocks = Permutation(whole, (self.seed, epoch, _BLOCKS))(places * ~ragged)
        blocks[ragged] = whole
        return blocks

    def _turned(self, epoch: int, rows: Integers) -> Integers:
        shift = Permutation(self.rows, (self.seed, epoch, _SHIFT))(np.zeros(1, np.int64))
        rows = rows + int(shift[0])
        rows -= (rows >= self.rows) * self.rows
        return rows

    def deciding(self) -> dict[str, Any]:
        """What decides which rows come when; orders that agree on it are the same."""
        keys = ["rows", "shuffle"]
        keys += {"global": ["seed"], "block": ["seed", "window_rows", "block_rows"], "none": []}[
            self.shuffle
        ]
        return {key: getattr(self, key) for key in keys}

    @property
    def window(self) -> int:
        """Rows of a whole window; `global` has only one."""
        whole = max(self.rows, 1)
        return whole if self.shuffle == "global" else min(self.window_rows or whole, whole)

    def window_at(self, position: int) -> int:
        """Number of the window that holds a position of an epoch."""
        return position // self.window

    def window_ranges(self, epoch: int, window: int) -> np.ndarray:
        """What a window reads, as stretches of rows that stand together.

        Returns:
            `[n, 2]` int64, first row and one past the last; nothing for a window past the end.
        """
        start, stop = window * self.window, min((window + 1) * self.window, self.rows)
        if start >= stop:
            return np.empty((0, 2), np.int64)
        if self.shuffle == "global":
            return np.array([[start, stop]])
        places = np.arange(start // self.block_rows, -(-stop // self.block_rows))
        if self.shuffle == "none":
            first = places * self.block_rows
            return np.stack([first, np.minimum(first + self.block_rows, stop)], 1)
        first = self._block_at(epoch, places) * self.block_rows
        length = np.minimum(first + self.block_rows, self.rows) - first
        first = self._turned(epoch, first)
        last = first + length
        # A block that goes round lies in two places.
        over = last > self.rows
        around = np.stack([np.zeros(over.sum(), np.int64), last[over] - self.rows], 1)
        return np.concatenate([np.stack([first, np.minimum(last, self.rows)], 1), around])
