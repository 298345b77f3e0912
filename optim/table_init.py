"""Initial values of a table as a pure function of (seed, table, row, column)."""

from __future__ import annotations

import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Rows drawn from one random stream. A shard draws whole blocks and keeps its own rows.
BLOCK_ROWS = 1024
# Blocks that a thread draws at a time.
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
        table: name of the table; tables of different names draw different numbers.
        row_offset, column_offset: position of the shard in the table.
        dim: number of columns of the whole table.
        low, high: bounds of the uniform distribution, used where `init.std` is None.
    """
    stop = row_offset + shard.shape[0]
    blocks = range(row_offset // BLOCK_ROWS, math.ceil(stop / BLOCK_ROWS))
    together = [blocks[first : first + _BLOCKS] for first in range(0, len(blocks), _BLOCKS)]

    # Elsewhere than in the thread that asks for it, gradients are recorded unless it is said again.
    @torch.no_grad()
    def fill(some: range) -> None:
        for block in some:
            values = _drawn_block(init, table, block, dim, low, high)
            first = max(row_offset, block * BLOCK_ROWS)
            last = min(stop, (block + 1) * BLOCK_ROWS)
            part = values[
                first - block * BLOCK_ROWS : last - block * BLOCK_ROWS,
                column_offset : column_offset + shard.shape[1],
            ]
            shard[first - row_offset : last - row_offset].copy_(torch.from_numpy(part))

    # Drawing numbers lets other threads run.
    with ThreadPoolExecutor(torch.get_num_threads(), "stampede-init") as threads:
        for _ in threads.map(fill, together):
            pass


def _drawn_block(
    init: TableInit, table: str, block: int, dim: int, low: float, high: float
) -> np.ndarray:
    """`[BLOCK_ROWS, dim]` float32, the initial values of a block of whole rows."""
    drawn = dim if init.columns is None else init.columns
    values = np.zeros((BLOCK_ROWS, dim), dtype=np.float32)
    key = np.random.SeedSequence([init.seed, zlib.crc32(table.encode()), block])
    generator = np.random.Generator(np.random.Philox(key))
    if init.std is None:
        values[:, :drawn] = generator.random((BLOCK_ROWS, drawn), dtype=np.float32)
        values[:, :drawn] *= high - low
        values[:, :drawn] += low
    else:
        values[:, :drawn] = generator.standard_normal((BLOCK_ROWS, drawn), dtype=np.float32)
        values[:, :drawn] *= init.std
    return values
