"""Where the parts of a sharded collection's tables lie, and which ranks share what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torchrec.distributed.types import ParameterSharding, ShardingEnv

Block = tuple[str, int]
"""A range of rows of a table, by the table's name and its first row."""


@dataclass
class CollectionLayout:
    """The plan of one collection's tables, the same on every rank.

    Attributes:
        holders: by table, the ranks that hold a part of it.
        replicated: tables of which every rank holds a copy.
        split_blocks: by range of rows that is split by columns, the ranks that hold its parts.
    """

    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    replicated: frozenset[str] = frozenset()
    split_blocks: dict[Block, tuple[int, ...]] = field(default_factory=dict)

    @property
    def all_holders(self) -> tuple[int, ...]:
        """Ranks that hold any part of any table."""
        return tuple(sorted({rank for ranks in self.holders.values() for rank in ranks}))

    @classmethod
    def of(
        cls, plan: Mapping[str, ParameterSharding], names: Mapping[str, str], env: ShardingEnv
    ) -> CollectionLayout:
        """Read a plan.

        Args:
            plan: by table, for the tables that count.
            names: of the tables in sums and random numbers, by table.
            env: the processes.
        """
        layout = cls()
        replicated = set()
        for table, sharding in sorted(plan.items()):
            name = names[table]
            if sharding.sharding_spec is None:
                replicated.add(name)
                layout.holders[name] = tuple(range(env.world_size))
                continue
            ranks_of: dict[int, list[int]] = defaultdict(list)
            for shard in sharding.sharding_spec.shards:
                ranks_of[shard.shard_offsets[0]].append(shard.placement.rank())
            layout.holders[name] = tuple(sorted({r for ranks in ranks_of.values() for r in ranks}))
            for row_offset, ranks in ranks_of.items():
                if len(ranks) > 1:
                    layout.split_blocks[name, row_offset] = tuple(sorted(set(ranks)))
        layout.replicated = frozenset(replicated)
        return layout


class ProcessGroups:
    """Process groups of our own, so that no collective of ours mixes with TorchRec's.

    Every rank must ask for the same groups in the same order, also for those it is not in.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks; None where there is nothing to communicate."""
        if len(ranks) < 2:
            return None
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks))
        return self._groups[ranks]
