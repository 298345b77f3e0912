"""A random order of any number of rows that is computed where it is needed, not stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# Numpy arrays and torch tensors have all operators used here in common, so that neither this
# module nor the preparation of data needs torch.
Integers = TypeVar("Integers", np.ndarray, "Tensor")

# Each round mixes high bits into low ones and low ones into high ones. Fewer leave neighbours of
# sets of a few thousand correlated; sets of a few bits need more, as their rounds have few keys.
_ROUNDS = 5
_KEY_BITS = 256

LARGEST = 2**62


@dataclass(frozen=True)
class Permutation:
    """A bijection of the numbers 0 to `size - 1`, chosen by a key; needs no memory.

    The smallest power of two that is not below `size` is permuted by rounds of steps that can each
    be undone: an exclusive or with a key, a multiplication by an odd number and a right shift onto
    itself. A result beyond `size` is permuted again until it is within, which takes less than one
    more turn on average (cycle walking, Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002).

    Attributes:
        size: 1 to 2^62.
        key: non-negative integers, such as a seed and an epoch; another key, another order.
    """

    size: int
    key: Sequence[int]

    def __post_init__(self) -> None:
        if not 1 <= self.size <= LARGEST:
            raise ValueError(f"size: found {self.size}; write 1 to 2^62")

    def __call__(self, positions: Integers) -> Integers:
        """What stands at the given positions.

        Args:
            positions: `[n]` int64 array or tensor on any device, each 0 to `size - 1`; not changed.

        Returns:
            `[n]` int64, of the same kind and on the same device.
        """
        bits = max(self.size - 1, 1).bit_length()
        keys = self._round_keys(bits)
        mixed = _mixed(positions + 0, keys, bits)
        if self.size == 1 << bits:
            return mixed
        walking = (mixed >= self.size).nonzero()
        # numpy's nonzero is a tuple of one array, torch's a matrix of one column.
        outside = walking[0] if isinstance(mixed, np.ndarray) else walking[:, 0]
        while len(outside):
            again = _mixed(mixed[outside], keys, bits)
            mixed[outside] = again
            outside = outside[again >= self.size]
        return mixed

    def _round_keys(self, bits: int) -> list[tuple[int, int]]:
        """What each round adds and multiplies with."""
        rounds = max(_ROUNDS, _KEY_BITS // (2 * bits))
        # The length tells keys apart that differ in zeros at their end.
        entropy = [*self.key, len(self.key)]
        drawn = np.random.SeedSequence(entropy).generate_state(2 * rounds, np.uint64)
        mask = (1 << bits) - 1
        return [
            (int(flip) & mask, int(factor) & mask | 1) for flip, factor in drawn.reshape(rounds, 2)
        ]


def _mixed(numbers: Integers, keys: list[tuple[int, int]], bits: int) -> Integers:
    """Permute 0 to 2^bits - 1, in place."""
    mask, shift = (1 << bits) - 1, (bits + 1) // 2
    for flip, factor in keys:
        numbers ^= flip
        numbers *= factor
        # Also drops what overflowed, and the sign.
        numbers &= mask
        numbers ^= numbers >> shift
    return numbers
