"""The cost of a plan for each rank: memory, lookups, and bytes sent in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stampede.engine.planning.workload import FLOAT, INT, LONG, PlacedShard, Workload

MEMORY = ("weights", "optimizer_state", "activations")
COMMUNICATION = ("ids", "pooled_rows", "gradients", "dense", "row_sums")


@dataclass
class TableGroup:
    """Fields of the tables of a sharding type, the largest first; rows, shards and ranks in all."""

    fields: list[str]
    rows: int
    shards: int
    ranks: int


@dataclass
class PlanCosts:
    """What a plan costs each rank; every array is `[ranks]` float64.

    Attributes:
        memory: bytes, by `MEMORY`.
        lookups: expected ids that a rank looks up in a step.
        sent, received: bytes of a step, those sent by `COMMUNICATION`; with Helen, in both passes.
        groups: the tables by sharding type.
    """

    memory: dict[str, np.ndarray]
    lookups: np.ndarray
    sent: dict[str, np.ndarray]
    received: np.ndarray
    groups: dict[str, TableGroup]

    @property
    def total_memory(self) -> np.ndarray:
        """Bytes of each rank."""
        return sum(self.memory.values())

    @property
    def total_sent(self) -> np.ndarray:
        """Bytes that each rank sends in a step."""
        return sum(self.sent.values())

    def imbalance(self) -> dict[str, float]:
        """Memory, lookups and communication of the largest rank, over the mean of all ranks."""
        traffic = self.total_sent + self.received
        of = {"memory": self.total_memory, "lookups": self.lookups, "communication": traffic}
        return {k: float(v.max() / v.mean()) if v.any() else 1.0 for k, v in of.items()}

    def to_dict(self) -> dict[str, Any]:
        """The costs for JSON, a value for each rank; memory and traffic in whole bytes."""

        def rounded(by_kind: dict[str, np.ndarray]) -> dict[str, list[int]]:
            return {kind: [round(v) for v in values.tolist()] for kind, values in by_kind.items()}

        return {
            "memory_bytes": rounded({**self.memory, "total": self.total_memory}),
            "lookups": [round(value, 1) for value in self.lookups.tolist()],
            "sent_bytes": rounded({**self.sent, "total": self.total_sent}),
            **rounded({"received_bytes": self.received}),
            "imbalance": self.imbalance(),
            "groups": {name: vars(group) for name, group in self.groups.items()},
        }


def plan_costs(workload: Workload, shards: Sequence[PlacedShard]) -> PlanCosts:
    """Add up what the shards cost the ranks that hold them."""
    ranks = workload.world_size
    costs = PlanCosts(
        {kind: np.zeros(ranks) for kind in MEMORY},
        np.zeros(ranks),
        {kind: np.zeros(ranks) for kind in COMMUNICATION},
        np.zeros(ranks),
        _groups(workload, shards),
    )
    costs.memory["weights"] += workload.dense_weight_bytes()
    costs.memory["optimizer_state"] += workload.dense_state_bytes()
    costs.memory["activations"] += workload.common_activation_bytes()
    for shard in shards:
        costs.memory["weights"][shard.rank] += workload.weight_bytes(shard)
        costs.memory["optimizer_state"][shard.rank] += workload.state_bytes(shard)
        costs.memory["activations"][shard.rank] += workload.activation_bytes(shard)
        costs.lookups[shard.rank] += workload.lookups(shard)
    _add_exchanges(costs, workload, shards)
    _add_split_rows(costs, workload, shards)
    for kind in ("ids", "pooled_rows", "gradients", "row_sums"):
        costs.sent[kind] *= workload.passes
    costs.received *= workload.passes
    # A ring all-reduce sends every part around twice.
    dense = 2 * (ranks - 1) / ranks * workload.dense_weight_bytes() * workload.passes
    costs.sent["dense"] += dense
    costs.received += dense
    return costs


def _add_exchanges(costs: PlanCosts, workload: Workload, shards: Sequence[PlacedShard]) -> None:
    """Ids go to the ranks that hold their rows, pooled rows come back, and gradients go out again.

    Each shard of a table split by rows returns a sum for every sample. For a replicated table,
    ranks exchange the rows' gradients and counts instead.
    """
    ranks, local = workload.world_size, workload.local_batch_size
    forward, backward = workload.bytes_on_the_way
    ids, columns = np.zeros(ranks), np.zeros(ranks)
    for shard in shards:
        if shard.is_replicated:
            row = 2 * LONG + shard.columns * FLOAT
            copies = workload.distinct_rows(shard) * row * (ranks - 1)
            costs.sent["gradients"][shard.rank] += copies
            costs.received[shard.rank] += copies
        else:
            # From each rank: ids, and the lengths of bags.
            from_each = workload.lookups(shard) / ranks * workload.data.id_bytes
            ids[shard.rank] += from_each + local * INT
            columns[shard.rank] += local * shard.columns
    for kind, there in (("ids", ids), ("gradients", columns * backward)):
        costs.sent[kind] += there.sum() - there
        costs.received += there * (ranks - 1)
    costs.sent["pooled_rows"] += columns * forward * (ranks - 1)
    costs.received += (columns.sum() - columns) * forward


def _add_split_rows(costs: PlanCosts, workload: Workload, shards: Sequence[PlacedShard]) -> None:
    """Ranks that hold columns of the same rows add up the rows' norms and states."""
    blocks: dict[tuple[str, int], list[PlacedShard]] = defaultdict(list)
    for shard in shards:
        if not shard.is_replicated:
            blocks[shard.table, shard.row_offset].append(shard)
    for block in blocks.values():
        members = sorted({shard.rank for shard in block})
        if len(members) > 1:
            rows = workload.distinct_rows(block[0])
            if workload.states.needs_all_rows:
                rows += block[0].rows
            values = rows * workload.states.values_per_row * FLOAT
            each = 2 * (len(members) - 1) / len(members) * values
            costs.sent["row_sums"][members] += each
            costs.received[members] += each


def _groups(workload: Workload, shards: Sequence[PlacedShard]) -> dict[str, TableGroup]:
    groups = {}
    for kind in sorted({shard.sharding_type for shard in shards}):
        members = [shard for shard in shards if shard.sharding_type == kind]
        names = {shard.table for shard in members}
        tables = [table for name, table in workload.tables.items() if name in names]
        tables.sort(key=lambda table: -table.rows)
        groups[kind] = TableGroup(
            [table.field for table in tables],
            sum(table.rows for table in tables),
            len(members),
            len({shard.rank for shard in members}),
        )
    return groups
