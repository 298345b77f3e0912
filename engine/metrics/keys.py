"""Score, label and weight of a sample in one 64-bit key that sorts by score, highest first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_LABEL = np.uint64(31)
_SCORE = np.uint64(32)
_WEIGHT = np.uint64(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)
_BELOW_SIGN = np.uint32(0x7FFFFFFF)


class Unpacked(NamedTuple):
    """What keys hold.

    Attributes:
        order: `[n]` uint32, equal for equal scores and ascending where scores descend.
        label: `[n]` uint64, 0 or 1.
        weight: `[n]` float32.
    """

    order: np.ndarray
    label: np.ndarray
    weight: np.ndarray


def pack(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Keys of samples, `[n]` uint64.

    From the highest bit on: 32 bits of the score, in an order that descends; the label; 31 bits of
    the weight, whose sign is not needed. Keys that are equal belong to samples that are.

    Args:
        scores: `[n]`, taken as float32; -0 is 0, NaN counts as the highest.
        labels: `[n]`, 0 or 1.
        weights: `[n]`, taken as float32, not negative; all 1 by default.
    """
    # Adding 0 makes +0 of -0.
    bits = (np.asarray(scores, np.float32) + np.float32(0)).view(np.uint32)
    keys = _reversed(bits).astype(np.uint64) << _SCORE
    keys |= np.asarray(labels).astype(np.uint64) << _LABEL
    ones = np.ones(1, np.float32)
    weights = ones if weights is None else np.ascontiguousarray(weights, np.float32)
    keys |= weights.view(np.uint32).astype(np.uint64) & _WEIGHT
    return keys


def unpack(keys: np.ndarray) -> Unpacked:
    """What `pack` put into keys."""
    return Unpacked(
        (keys >> _SCORE).astype(np.uint32),
        (keys >> _LABEL) & np.uint64(1),
        (keys & _WEIGHT).astype(np.uint32).view(np.float32),
    )


def score_of(order: np.ndarray) -> np.ndarray:
    """Scores, `[n]` float32, from `Unpacked.order`."""
    return _reversed(order).view(np.float32)


def _reversed(bits: np.ndarray) -> np.ndarray:
    """Bits of floats so that they ascend where the floats descend, and back."""
    return np.where(bits & _SIGN, bits, bits ^ _BELOW_SIGN)
