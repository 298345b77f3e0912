"""A sharding plan as a list of the parts of tables that each rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchrec.distributed.types import ShardingPlan, ShardingType


@dataclass(frozen=True)
class PlacedShard:
    """A table, or a part of one, on a rank.

    Attributes:
        table: its name.
        sharding_type: TorchRec's.
        rank: that holds it.
        row_offset, rows, column_offset, columns: which part of the table it is.
    """

    table: str
    sharding_type: str
    rank: int
    row_offset: int
    rows: int
    column_offset: int
    columns: int

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has a copy, and looks up its own part of the batch only."""
        return self.sharding_type == ShardingType.DATA_PARALLEL.value


def placed_shards(
    plan: ShardingPlan, shapes: dict[str, tuple[int, int]], world_size: int
) -> Iterator[PlacedShard]:
    """Every part of every table.

    Args:
        shapes: rows and columns of the tables, by name.
    """
    for module in plan.plan.values():
        for table, sharding in module.items():
            if sharding.sharding_spec is None:
                rows, columns = shapes[table]
                for rank in range(world_size):
                    yield PlacedShard(table, sharding.sharding_type, rank, 0, rows, 0, columns)
                continue
            for shard in sharding.sharding_spec.shards:
                (row_offset, column_offset), (rows, columns) = (
                    shard.shard_offsets,
                    shard.shard_sizes,
                )
                yield PlacedShard(
                    table,
                    sharding.sharding_type,
                    shard.placement.rank(),
                    row_offset,
                    rows,
                    column_offset,
                    columns,
                )
