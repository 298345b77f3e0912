"""The order of rows in each epoch: computed from seed, epoch and position, never stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# Only operators that numpy and torch share are used: preparing data must not import torch.
Integers = TypeVar("Integers", np.ndarray, "Tensor")

Shuffle = Literal["global", "block", "rotate", "none"]

# Rows of a block. 2.5 MB of Criteo, so that a disk reads at nearly full speed.
BLOCK_ROWS = 1 << 14

# Last part of a permutation's key, after seed and epoch, so that the four permutations differ.
_WHOLE, _BLOCKS, _WINDOW, _SHIFT = range(4)

# Each round mixes high bits into low ones and low ones into high ones. With fewer rounds,
# neighbours stay correlated in sets of a few thousand; tiny sets need more, as keys are short.
_ROUNDS = 5
_KEY_BITS = 256


@dataclass(frozen=True)
class Permutation:
    """A permutation of 0 to `size - 1`, chosen by a key and computed without memory.

    Numbers below the next power of two pass rounds of invertible steps: exclusive or with a key,
    multiplication by an odd number, exclusive or with the number shifted right. Results of `size`
    or more are permuted again until they are below it, less than once on average (cycle walking,
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Attributes:
        size: 1 to 2^62.
        key: non-negative integers, such as a seed and an epoch.
    """

    size: int
    key: Sequence[int]

    def __call__(self, positions: Integers) -> Integers:
        """The numbers at the given positions of the permuted sequence: `[n]` int64.

        Args:
            positions: `[n]` int64, each 0 to `size - 1`; an array, or a tensor on any device.
        """
        bits = max(self.size - 1, 1).bit_length()
        rounds = max(_ROUNDS, _KEY_BITS // (2 * bits))
        # With the length, keys that differ only in trailing zeros draw different numbers.
        entropy = [*self.key, len(self.key)]
        drawn = np.random.SeedSequence(entropy).generate_state(2 * rounds, np.uint64)
        keys = [(int(flip), int(factor) | 1) for flip, factor in drawn.reshape(rounds, 2)]
        mixed = _mixed(positions + 0, keys, bits)
        walking = (mixed >= self.size).nonzero()
        # numpy's nonzero gives a tuple of one array, torch's a matrix of one column.
        outside = walking[0] if isinstance(mixed, np.ndarray) else walking[:, 0]
        while len(outside):
            again = _mixed(mixed[outside], keys, bits)
            mixed[outside] = again
            outside = outside[again >= self.size]
        return mixed


def _mixed(numbers: Integers, keys: list[tuple[int, int]], bits: int) -> Integers:
    """Permute 0 to 2^bits - 1, in place."""
    mask, shift = (1 << bits) - 1, (bits + 1) // 2
    for flip, factor in keys:
        numbers ^= flip & mask
        numbers *= factor & mask
        numbers &= mask  # also drops what overflowed, and the sign
        numbers ^= numbers >> shift
    return numbers


@dataclass(frozen=True)
class Order:
    """The order in which each epoch visits a part's rows, every row once.

    `global`: all rows are shuffled.
    `block`: blocks of `block_rows` neighbouring rows are shuffled, then the rows within each window
    of several blocks. Blocks begin at another row in each epoch and wrap around from the last row
    to the first; the rows after the last whole block come last.
    `rotate`: the first epoch from the first row, each later one from another row to the last and
    then from the first. Enough for rows that are independent of each other.
    `none`: from the first to the last row.

    Attributes:
        rows: of the part.
        shuffle: see above.
        seed: of all epochs.
        window_rows: rows of a window, a multiple of `block_rows`; 0: the whole part. With `none`,
            windows only decide what is read ahead.
        block_rows: rows of a block, a power of two.
    """

    rows: int
    shuffle: Shuffle = "none"
    seed: int = 0
    window_rows: int = 0
    block_rows: int = BLOCK_ROWS

    def rows_at(
        self, epoch: int, start: int, stop: int, count: Callable[[int, int], Integers] = np.arange
    ) -> Integers:
        """The rows at the positions `start` to `stop - 1` of an epoch: `[stop - start]` int64.

        Args:
            count: makes the int64 positions: `np.arange`, or `torch.arange` for a device.
        """
        positions = count(start, stop)
        if self.shuffle == "none" or stop == start:
            return positions
        if self.shuffle == "global":
            return Permutation(self.rows, (self.seed, epoch, _WHOLE))(positions)
        if self.shuffle == "rotate":
            return self._shifted(epoch, positions) if epoch else positions
        rows, bits = positions, self.block_rows.bit_length() - 1
        for number in range(start // self.window, (stop - 1) // self.window + 1):
            first = number * self.window
            last = min(first + self.window, self.rows)
            here = slice(max(start, first) - start, min(stop, last) - start)
            slots = Permutation(last - first, (self.seed, epoch, _WINDOW, number))(
                rows[here] - first
            )
            # Shifts, as 64-bit divisions would double the time.
            blocks = self._block_at(epoch, count(first >> bits, -(-last >> bits)))
            rows[here] = (blocks[slots >> bits] << bits) + (slots & (self.block_rows - 1))
        return self._shifted(epoch, rows)

    def _block_at(self, epoch: int, places: Integers) -> Integers:
        """The blocks at the given places of the epoch's block order."""
        whole = self.rows // self.block_rows
        if not whole:
            return places
        ragged = places == whole
        blocks = Permutation(whole, (self.seed, epoch, _BLOCKS))(places * ~ragged)
        blocks[ragged] = whole
        return blocks

    def _shifted(self, epoch: int, rows: Integers) -> Integers:
        # They are counted from the start of the epoch's first block.
        shift = Permutation(self.rows, (self.seed, epoch, _SHIFT))(np.zeros(1, np.int64))
        rows = rows + int(shift[0])
        rows -= (rows >= self.rows) * self.rows
        return rows

    def deciding(self) -> dict[str, Any]:
        """The attributes that the order depends on."""
        more = {"none": [], "block": ["seed", "window_rows", "block_rows"]}
        keys = ["rows", "shuffle", *more.get(self.shuffle, ["seed"])]
        return {key: getattr(self, key) for key in keys}

    @property
    def window(self) -> int:
        """Rows of a full window; `global` has one window only."""
        whole = max(self.rows, 1)
        return whole if self.shuffle == "global" else min(self.window_rows or whole, whole)

    def window_at(self, position: int) -> int:
        """Index of the window that contains this position."""
        return position // self.window

    def window_ranges(self, epoch: int, window: int) -> np.ndarray:
        """The rows that a window reads, as ranges `[n, 2]` of first row and one past the last."""
        start, stop = window * self.window, min((window + 1) * self.window, self.rows)
        if start >= stop:  # past the end
            return np.empty((0, 2), np.int64)
        if self.shuffle == "global":
            return np.array([[start, stop]])
        places = np.arange(start // self.block_rows, -(-stop // self.block_rows))
        if self.shuffle == "none":
            first = places * self.block_rows
            return np.stack([first, np.minimum(first + self.block_rows, stop)], 1)
        first = self._block_at(epoch, places) * self.block_rows
        length = np.minimum(first + self.block_rows, self.rows) - first
        first = self._shifted(epoch, first)
        last = first + length
        # A block that wraps around becomes two ranges.
        over = last > self.rows
        around = np.stack([np.zeros(over.sum(), np.int64), last[over] - self.rows], 1)
        return np.concatenate([np.stack([first, np.minimum(last, self.rows)], 1), around])
