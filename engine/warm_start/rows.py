"""Rows of a whole tensor put into a table, wherever a sharding plan has its parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

# Rows that are copied together.
_PIECE = 1 << 18


@torch.no_grad()
def copy_rows_(table: Tensor | ShardedTensor, whole: Tensor, rows: Tensor) -> None:
    """Overwrite rows of the parts that this process has of a table, or of a state of its rows.

    Args:
        table: `[n, columns]` or `[n]`, on any device; a part or a copy of it is here.
        whole: `[m, columns]` or `[m]`, on the CPU.
        rows: `[n]` int64, the row of `whole` for each of the table's, -1 for those that stay.
    """
    for part, offsets in _parts(table):
        mine = rows[offsets[0] : offsets[0] + len(part)]
        for places in (mine >= 0).nonzero().squeeze(1).split(_PIECE):
            values = whole[mine[places]]
            if part.ndim == 2:
                values = values[:, offsets[1] : offsets[1] + part.shape[1]]
            part[places.to(part.device)] = values.to(part)


def has_rows_here(table: Tensor | ShardedTensor) -> bool:
    """Whether this process has a part of a table that is not empty."""
    return any(part.numel() for part, _ in _parts(table))


def _parts(table: Tensor | ShardedTensor) -> Iterator[tuple[Tensor, list[int]]]:
    """This process's parts, and where they begin."""
    if not isinstance(table, ShardedTensor):
        yield table.detach(), [0] * table.ndim
        return
    for shard in table.local_shards():
        yield shard.tensor.detach(), list(shard.metadata.shard_offsets)
