"""Where the parts of a sharded collection's tables lie, and which ranks share what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torchrec.distributed.types import ParameterSharding

Block = tuple[str, int]
"""A range of rows of a table, by the table's name and its first row."""


@dataclass
class CollectionLayout:
    """The plan of one collection's tables, the same on every rank.

    Attributes:
        tables: their names.
        split_blocks: by range of rows that is split by columns, the ranks that hold its parts.
    """

    tables: tuple[str, ...] = ()
    split_blocks: dict[Block, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, plan: Mapping[str, ParameterSharding], names: Mapping[str, str]
    ) -> CollectionLayout:
        """Read a plan.

        Args:
            plan: by table, for the tables that count.
            names: of the tables in sums and random numbers, by table.
        """
        layout = cls(tuple(sorted(names[table] for table in plan)))
        for table, sharding in plan.items():
            ranks_of: dict[int, list[int]] = defaultdict(list)
            # Data-parallel tables have no shards.
            for shard in sharding.sharding_spec.shards if sharding.sharding_spec else ():
                ranks_of[shard.shard_offsets[0]].append(shard.placement.rank())
            for row_offset, ranks in ranks_of.items():
                if len(ranks) > 1:
                    layout.split_blocks[names[table], row_offset] = tuple(sorted(set(ranks)))
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
