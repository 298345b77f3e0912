"""Sums over the shards of tables, in process groups fixed when the model is sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from stampede.optim.rows import RowGradients, merge_rows
from stampede.optim.table_array import TableArray
from stampede.optim.update_settings import UpdateSettings

Block = tuple[str, int]
"""A range of rows of a table, by the table's name and its first row."""


def blocks_split_by_columns(
    plan: Mapping[str, ParameterSharding], names: Mapping[str, str]
) -> dict[Block, tuple[int, ...]]:
    """The ranks that hold the parts of each range of rows split by columns, alike on every rank.

    Args:
        names: of the plan's tables in sums and random numbers.
    """
    ranks_of: dict[Block, list[int]] = defaultdict(list)
    for table, sharding in plan.items():
        # Data-parallel tables have no shards.
        for shard in sharding.sharding_spec.shards if sharding.sharding_spec else ():
            ranks_of[names[table], shard.shard_offsets[0]].append(shard.placement.rank())
    return {b: tuple(sorted(set(ranks))) for b, ranks in ranks_of.items() if len(ranks) > 1}


# By default group and ranks. A group keeps files, threads and GPU memory until the default group
# ends, so each is made once, even if a process trains several models.
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """A process group of our own, so that no collective of ours mixes with TorchRec's.

    Every rank must ask for the same groups in the same order, including groups it is not in. None
    for a single rank.
    """
    if len(ranks) < 2:
        return None
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks))
    return groups[ranks]


class CollectionGroups:
    """The process groups of one collection, and the `Reduction` that runs in them.

    Ranks without tables take part too.

    Args:
        split_blocks: see `blocks_split_by_columns`.
        settings: by the table's name in sums.

    Attributes:
        everyone: all ranks; None if there is only one.
        is_needed: whether there are others, or tables split by columns, to add up over.
    """

    def __init__(
        self,
        split_blocks: Mapping[Block, tuple[int, ...]],
        settings: Mapping[str, UpdateSettings],
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        self.device = device
        self._split_blocks = split_blocks
        by_ranks: dict[tuple[int, ...], list[Block]] = defaultdict(list)
        for block, ranks in sorted(split_blocks.items()):
            by_ranks[ranks].append(block)
        self._by_ranks = [
            (blocks, group_of(ranks), env.rank in ranks)
            for ranks, blocks in sorted(by_ranks.items())
        ]
        self._world_size = env.world_size
        self.everyone = group_of(tuple(range(env.world_size)))
        self.is_needed = self.everyone is not None or bool(split_blocks)
        self._refuses_nonfinite = any(s.on_nonfinite == "error" for s in settings.values())

    def exchange(self, rows: RowGradients) -> RowGradients:
        """Rows of a replicated table from all ranks, with the mean of their gradients.

        `set_gradient_division(False)` of TorchRec leaves out the division by the number of ranks.
        """
        if self.everyone is None:
            return rows
        size = torch.tensor([len(rows.rows)], device=rows.rows.device)
        sizes = [torch.empty_like(size) for _ in range(self._world_size)]
        dist.all_gather(sizes, size, group=self.everyone)
        lengths = torch.cat(sizes).tolist()
        parts = []
        for values in rows:
            padded = values.new_zeros((max(lengths), *values.shape[1:]))
            padded[: len(values)] = values
            gathered = [torch.empty_like(padded) for _ in range(self._world_size)]
            dist.all_gather(gathered, padded, group=self.everyone)
            parts.append([part[:n] for part, n in zip(gathered, lengths, strict=True)])
        merged = merge_rows([RowGradients(*part) for part in zip(*parts, strict=True)])
        if not get_gradient_division():
            return merged
        return merged._replace(grads=merged.grads / self._world_size)

    def sum_columns_(self, each: Sequence[tuple[TableArray, Tensor | None, Tensor]]) -> None:
        """See `Reduction`."""
        pieces: dict[Block, list[Tensor]] = defaultdict(list)
        for array, rows, values in each:
            blocks = [(shard.table, shard.row_offset) for shard in array.shards]
            if self._split_blocks.keys().isdisjoint(blocks):
                continue
            bounds = array.starts if rows is None else array.bounds_of(rows)
            for block, first, stop in zip(blocks, bounds, bounds[1:], strict=False):
                if block in self._split_blocks:
                    pieces[block].append(values[:, first:stop])
        for blocks, group, is_member in self._by_ranks:
            present = [block for block in blocks if block in pieces]
            if not is_member or not present:
                continue
            # All column shards of a block were sent the same ids, so the sizes agree.
            sums = [torch.stack(pieces[block]).sum(0) for block in present]
            whole = torch.cat([part.flatten() for part in sums])
            if group is not None and whole.numel():
                dist.all_reduce(whole, group=group)
            parts = whole.split([part.numel() for part in sums])
            for block, part in zip(present, parts, strict=True):
                for piece in pieces[block]:
                    piece.copy_(part.view_as(piece))

    def any(self, found: bool) -> bool:
        """Whether any rank found something."""
        if self.everyone is None:
            return found
        flag = torch.tensor(int(found), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.everyone)
        return bool(flag)

    def refuses(self, found: bool) -> bool:
        """See `Reduction`."""
        return self.any(found) if self._refuses_nonfinite else found
