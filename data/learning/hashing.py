"""A hash of texts that is the same in every version and on every machine."""

from __future__ import annotations

import numpy as np
import polars as pl

_OFFSET = np.uint64(0xCBF29CE484222325)
_PRIME = np.uint64(0x100000001B3)


def bucket(ids: pl.Series, buckets: int, seed: int) -> np.ndarray:
    """A bucket for each text, 0 to `buckets - 1`: `[n]` int64; null gets any.

    FNV-1a over the UTF-8 bytes, from a start that depends on the seed, then the finalizer of
    splitmix64, since the low bits of FNV alone are those of the last characters.
    """
    # Polars' own hash may change with its version, and with it the rows of a trained table.
    ids = ids.fill_null("")
    distinct = ids.unique()
    position = ids.replace_strict(
        distinct, pl.int_range(len(distinct), eager=True), return_dtype=pl.Int64
    )
    hashes = _mixed(_fnv(distinct, seed))
    return (hashes % np.uint64(buckets)).astype(np.int64)[position.to_numpy().astype(np.int64)]


def _fnv(texts: pl.Series, seed: int) -> np.ndarray:
    data = np.frombuffer("".join(texts.to_list()).encode(), dtype=np.uint8)
    lengths = texts.str.len_bytes().to_numpy().astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    start = _mixed(np.array([seed], dtype=np.uint64)) ^ _OFFSET
    hashes = np.full(len(texts), start[0], dtype=np.uint64)
    # Longest first: the texts with a byte at a place are then the first ones.
    order = np.argsort(-lengths, kind="stable")
    starts, sorted_lengths = starts[order], lengths[order]
    for place in range(int(sorted_lengths[0]) if len(order) else 0):
        longer = np.searchsorted(-sorted_lengths, -place, side="left")
        hashes[:longer] = (hashes[:longer] ^ data[starts[:longer] + place]) * _PRIME
    found = np.empty_like(hashes)
    found[order] = hashes
    return found


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))
