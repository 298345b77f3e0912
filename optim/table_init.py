# pyright: basic
"""Initial values of a table as a pure function of (seed, table, row, column)."""

from __future__ import annotations

import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Rows per random stream. A shard draws whole blocks and keeps its own rows.
BLOCK_ROWS = 1024
# Blocks per call of a thread.
_BLOCKS = 64


@dataclass(frozen=True)
class TableInit:
    """Distribution of a table's initial values.

    Args:
        std: standard deviation of a normal distribution with mean 0; `None` takes TorchRec's
            default, uniform between the table's `weight_init_min` and `weight_init_max`.
        columns: only the first `columns` columns are drawn, the rest are 0; `None`: all.
        seed: any integer of at least 0.
    """

    std: float | None = None
    columns: int | None = None
    seed: int = 0


def fill_shard_(
    shard: Tensor,
    init: TableInit,
    *,
    table: str,
    row_offset: int,
    column_offset: int,
    dim: int,
    low: float,
    high: float,
) -> None:
    """Write a shard's initial values, in place, without building the rest of the table.

    Args:
        shard: `[rows, columns]` part of the table, any floating dtype and device.
        table: its name; tables of different names draw different numbers.
        row_offset, column_offset: position of the shard in the table of `dim` columns.
        low, high: bounds of the uniform distribution, used where `init.std` is None.
    """
    stop = row_offset + shard.shape[0]
    blocks = range(row_offset // BLOCK_ROWS, math.ceil(stop / BLOCK_ROWS))
    together = [blocks[first : first + _BLOCKS] for first in range(0, len(blocks), _BLOCKS)]
    drawn = dim if init.columns is None else init.columns

    # `no_grad` holds for one thread only, so each thread needs it.
    @torch.no_grad()
    def fill(some: range) -> None:
        for block in some:
            values = np.zeros((BLOCK_ROWS, dim), dtype=np.float32)
            key = np.random.SeedSequence([init.seed, zlib.crc32(table.encode()), block])
            generator = np.random.Generator(np.random.Philox(key))
            if init.std is None:
                values[:, :drawn] = generator.random((BLOCK_ROWS, drawn), dtype=np.float32)
                values[:, :drawn] *= high - low
                values[:, :drawn] += low
            else:
                shape = BLOCK_ROWS, drawn
                values[:, :drawn] = generator.standard_normal(shape, dtype=np.float32)
                values[:, :drawn] *= init.std
            begin = block * BLOCK_ROWS
            first, last = max(row_offset, begin), min(stop, begin + BLOCK_ROWS)
            columns = slice(column_offset, column_offset + shard.shape[1])
            part = values[first - begin : last - begin, columns]
            shard[first - row_offset : last - row_offset].copy_(torch.from_numpy(part))

    # Drawing random numbers releases the GIL.
    with ThreadPoolExecutor(torch.get_num_threads(), "stampede-init") as threads:
        for _ in threads.map(fill, together):
            pass


def drawn_by_id(keys: np.ndarray, init: TableInit, *, table: str, dim: int) -> np.ndarray:
    """Initial values of rows as a function of (seed, table, id, column), wherever the rows are.

    Args:
        keys: `[n]` uint64, a hash of each id.
        init: of a normal distribution.
        table: name of the table.
        dim: number of columns of the whole table.

    Returns:
        `[n, dim]` float32: two uniform numbers of splitmix64 each, by Box and Muller (1958).
    """
    drawn = dim if init.columns is None else init.columns
    values = np.zeros((len(keys), dim), dtype=np.float32)
    own = np.random.SeedSequence([init.seed, zlib.crc32(table.encode())]).generate_state(1, "u8")
    begin = _mixed(keys ^ own[0])
    # Overflow is intended: arithmetic modulo 2^64.
    with np.errstate(over="ignore"):
        for column in range(drawn):
            bits = _mixed(begin + np.uint64(column + 1) * np.uint64(0x9E3779B97F4A7C15))
            first = ((bits >> np.uint64(32)).astype(np.float64) + 1.0) / 2.0**32
            second = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2.0**32
            values[:, column] = np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * math.pi * second)
    return values * np.float32(init.std)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64, of uint64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
