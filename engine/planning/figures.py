"""Memory, lookups and communication of every rank under a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stampede.engine.planning.memory import FLOAT
from stampede.engine.planning.workload import INT, LONG, PlacedShard, Workload

MEMORY = ("weights", "optimizer_state", "activations")
COMMUNICATION = ("ids", "pooled_rows", "gradients", "dense", "row_sums")


@dataclass
class TableGroup:
    """The tables of one sharding type.

    Attributes:
        fields: their names, the largest table first.
        rows: of all of them.
        shards: number of parts.
        ranks: number of ranks that hold one.
    """

    fields: list[str]
    rows: int
    shards: int
    ranks: int


@dataclass
class Figures:
    """What a plan asks of every rank.

    Attributes:
        memory: bytes by kind, `[ranks]` each; kinds are those of `MEMORY`.
        lookups: `[ranks]` ids of a step that are looked up there, in expectation.
        sent: bytes that leave a rank in a step, by kind, `[ranks]` each; kinds are those of
            `COMMUNICATION`. Helen's two passes are both in it.
        received: `[ranks]` bytes that come to a rank.
        groups: the tables by sharding type.
    """

    memory: dict[str, np.ndarray]
    lookups: np.ndarray
    sent: dict[str, np.ndarray]
    received: np.ndarray
    groups: dict[str, TableGroup]

    @property
    def total_memory(self) -> np.ndarray:
        """`[ranks]` bytes."""
        return sum(self.memory.values())

    @property
    def total_sent(self) -> np.ndarray:
        """`[ranks]` bytes."""
        return sum(self.sent.values())

    @property
    def worst_rank(self) -> int:
        """That needs the most memory."""
        return int(self.total_memory.argmax())

    def imbalance(self) -> dict[str, float]:
        """The largest rank's memory, lookups and communication over the mean."""
        traffic = self.total_sent + self.received
        of = {"memory": self.total_memory, "lookups": self.lookups, "communication": traffic}
        return {k: float(v.max() / v.mean()) if v.any() else 1.0 for k, v in of.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: bytes and ids of a step, rank by rank."""

        def whole(values: np.ndarray) -> list[int]:
            return [round(value) for value in values.tolist()]

        memory = {**self.memory, "total": self.total_memory}
        sent = {**self.sent, "total": self.total_sent}
        return {
            "memory_bytes": {kind: whole(values) for kind, values in memory.items()},
            "lookups": [round(value, 1) for value in self.lookups.tolist()],
            "sent_bytes": {kind: whole(values) for kind, values in sent.items()},
            "received_bytes": whole(self.received),
            "imbalance": self.imbalance(),
            "groups": {name: vars(group) for name, group in self.groups.items()},
        }


def figures(workload: Workload, shards: Sequence[PlacedShard]) -> Figures:
    """Add up what the parts of tables on each rank take."""
    ranks = workload.world_size
    found = Figures(
        {kind: np.zeros(ranks) for kind in MEMORY},
        np.zeros(ranks),
        {kind: np.zeros(ranks) for kind in COMMUNICATION},
        np.zeros(ranks),
        _groups(workload, shards),
    )
    found.memory["weights"] += workload.dense_weight_bytes()
    found.memory["optimizer_state"] += workload.dense_state_bytes()
    found.memory["activations"] += workload.common_activation_bytes()
    for shard in shards:
        found.memory["weights"][shard.rank] += workload.weight_bytes(shard)
        found.memory["optimizer_state"][shard.rank] += workload.state_bytes(shard)
        found.memory["activations"][shard.rank] += workload.activation_bytes(shard)
        found.lookups[shard.rank] += workload.lookups(shard)
    _exchanges(found, workload, shards)
    _replicated(found, workload, shards)
    _split_columns(found, workload, shards)
    for kind in ("ids", "pooled_rows", "gradients", "row_sums"):
        found.sent[kind] *= workload.passes
    found.received *= workload.passes
    # A ring: every rank passes each part on twice.
    dense = 2 * (ranks - 1) / ranks * workload.dense_weight_bytes() * workload.passes
    found.sent["dense"] += dense
    found.received += dense
    return found


def _exchanges(found: Figures, workload: Workload, shards: Sequence[PlacedShard]) -> None:
    """Ids to the ranks that hold their rows, pooled rows back, gradients there again.

    Every rank sends the ids of its samples, and gets sums over its samples, from every part of a
    table; where a table is split by rows each part gives a sum for every sample.
    """
    ranks, local = workload.world_size, workload.local_batch_size
    forward, backward = workload.bytes_on_the_way
    ids, columns = np.zeros(ranks), np.zeros(ranks)
    for shard in shards:
        if not shard.is_replicated:
            # From each rank.
            sent = workload.lookups(shard) / ranks * workload.data.id_bytes
            ids[shard.rank] += sent + local * INT
            columns[shard.rank] += local * shard.columns
    for kind, there in (("ids", ids), ("gradients", columns * backward)):
        found.sent[kind] += there.sum() - there
        found.received += there * (ranks - 1)
    found.sent["pooled_rows"] += columns * forward * (ranks - 1)
    found.received += (columns.sum() - columns) * forward


def _replicated(found: Figures, workload: Workload, shards: Sequence[PlacedShard]) -> None:
    """Rows, gradients and counts of the batch, from every rank to every other."""
    for shard in shards:
        if shard.is_replicated:
            row = 2 * LONG + shard.columns * FLOAT
            sent = workload.distinct_rows(shard) * row * (workload.world_size - 1)
            found.sent["gradients"][shard.rank] += sent
            found.received[shard.rank] += sent


def _split_columns(found: Figures, workload: Workload, shards: Sequence[PlacedShard]) -> None:
    """Norms and row states of rows whose columns lie on several ranks, added up among them."""
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
            # A ring, as for the dense layers.
            each = 2 * (len(members) - 1) / len(members) * values
            found.sent["row_sums"][members] += each
            found.received[members] += each


def _groups(workload: Workload, shards: Sequence[PlacedShard]) -> dict[str, TableGroup]:
    by_type: dict[str, list[PlacedShard]] = defaultdict(list)
    for shard in shards:
        by_type[shard.sharding_type].append(shard)
    groups = {}
    for kind, members in sorted(by_type.items()):
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
