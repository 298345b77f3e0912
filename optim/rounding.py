"""Stochastic rounding to fp16 and bf16 whose randomness does not depend on the sharding plan."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# Bits of the mantissa, and the exponent below which the step between neighbours stays the same.
# bfloat16's is -126, but powers of two are computed in float32, where 2**133 does not exist.
_FORMATS = {torch.float16: (10, -14), torch.bfloat16: (7, -110)}
_LOW_32 = (1 << 32) - 1


def table_key(seed: int, table: str) -> int:
    """A table's part of the random key, 64 bits; any seed fits."""
    digest = hashlib.blake2b(f"{seed} {table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_unit(keys: Tensor, rows: Tensor, columns: Tensor, step: int) -> Tensor:
    """Uniform numbers in [0, 1), a pure function of table, row, column and step.

    Args:
        keys: `[n]` int64 `table_key` of each row.
        rows: `[n]` int64 row of the table, not of the shard.
        columns: `[n, dim]` or `[dim]` int64 column of the table.

    Returns:
        `[n, dim]` float32, multiples of 2**-24.
    """
    row_keys = _mix(_mix(keys + step * 0x9E3779B1) + rows)[:, None]
    return (_mix(row_keys + columns * 0x85EBCA77) >> 8).to(torch.float32) * 2.0**-24


def round_stochastically(values: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to one of the two neighbours, each with the probability that keeps the mean.

    Args:
        unit: uniform numbers in [0, 1), shape of `values`.
        dtype: `torch.float16` or `torch.bfloat16`.
    """
    bits, smallest = _FORMATS[dtype]
    exponent = (torch.frexp(values).exponent - 1).clamp_min(smallest) - bits
    scaled = torch.ldexp(values, -exponent)
    lower = scaled.floor()
    return torch.ldexp(lower + (unit < scaled - lower), exponent).to(dtype)


def _mix(values: Tensor) -> Tensor:
    """A 32-bit finaliser (murmur3's) on int64: every result bit depends on every input bit."""
    # Fold in the upper half first, to use all 64 bits of the key.
    values = (values ^ (values >> 32)) & _LOW_32
    values = ((values ^ (values >> 16)) * 0x85EBCA6B) & _LOW_32
    values = ((values ^ (values >> 13)) * 0xC2B2AE35) & _LOW_32
    return values ^ (values >> 16)
