"""TorchRec's planner, with the memory that our tables take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from stampede.engine.planning.shards import PlacedShard
from stampede.engine.planning.workload import Workload
from stampede.optim.sharded.supported import SHARDING_TYPES

# Columns; FBGEMM needs a multiple of 4.
SMALLEST_PARTITION = 4

# Of a GPU's memory, for CUDA, NCCL and fragments: TorchRec's own default.
RESERVED_OF_GPU = 0.15


@dataclass(frozen=True)
class Cluster:
    """Devices that are alike.

    Attributes:
        world_size, local_world_size: number of them, and in a node.
        device_type: `cuda` or `cpu`.
        memory: bytes of each.
    """

    world_size: int
    local_world_size: int
    device_type: str
    memory: int

    @property
    def reserved(self) -> float:
        """Share of the memory that is kept free."""
        return RESERVED_OF_GPU if self.device_type == "cuda" else 0.0

    @property
    def usable(self) -> int:
        """Bytes of a device that a run may take."""
        return int(self.memory * (1.0 - self.reserved))

    def topology(self) -> Topology:
        """As TorchRec describes it."""
        on_gpu = self.device_type == "cuda"
        return Topology(
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            compute_device=self.device_type,
            **{"hbm_cap" if on_gpu else "ddr_cap": self.memory},
        )


def search_plan(
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    sharding_types: Sequence[str],
    workload: Workload,
    cluster: Cluster,
) -> ShardingPlan:
    """The planner's choice.

    Args:
        sharding_types: TorchRec's sharding types that the planner may choose from.

    Raises:
        PlannerError: the tables do not fit, or not in this way.
    """
    constraints = {
        # Without a smallest width the planner does not split tables as narrow as a CTR model's.
        name: ParameterConstraints(
            sharding_types=list(sharding_types),
            min_partition=SMALLEST_PARTITION,
            pooling_factors=[table.ids_per_sample],
        )
        for name, table in workload.tables.items()
    }
    topology = cluster.topology()
    # TorchRec's own estimate knows a closed list of optimizers.
    estimators = [EmbeddingPerfEstimator(topology, constraints), _Storage(workload, cluster)]
    planner = EmbeddingShardingPlanner(
        topology=topology,
        constraints=constraints,
        batch_size=workload.local_batch_size,
        enumerator=_Enumerator(topology, workload.local_batch_size, constraints, estimators),
        storage_reservation=_Reservation(workload, cluster),
        stats=NoopEmbeddingStats(),
    )
    return planner.plan(model, sharders)


class _Enumerator(EmbeddingEnumerator):
    """Options in one order in every process: among equals the planner takes the first.

    TorchRec's own order comes from a set of strings. A run that is started again is to get the same
    plan, as another one rounds sums in another order.
    """

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """The options of all tables."""
        options = super().enumerate(module, sharders)
        tables = list(dict.fromkeys(option.name for option in options))
        return sorted(
            options,
            key=lambda option: (
                tables.index(option.name),
                SHARDING_TYPES.index(option.sharding_type),
                option.compute_kernel,
            ),
        )


class _Storage(ShardEstimator):
    """Bytes of the parts of tables, as `Workload` counts them."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload = workload
        self._tables = workload.tables
        self._on_gpu = cluster.device_type == "cuda"

    def estimate(self, sharding_options: list[ShardingOption], *_: Any, **__: Any) -> None:
        """Write the bytes into the options; what else is given differs by TorchRec's version."""
        workload = self._workload
        for option in sharding_options:
            table = self._tables[option.name]
            for shard in option.shards:
                part = PlacedShard(
                    option.name,
                    option.sharding_type,
                    0,
                    shard.offset[0],
                    shard.size[0],
                    shard.offset[1],
                    shard.size[1],
                )
                needed = workload.weight_bytes(part) + workload.state_bytes(part)
                needed += workload.activation_bytes(part, table)
                shard.storage = Storage(
                    hbm=needed if self._on_gpu else 0, ddr=0 if self._on_gpu else needed
                )


class _Reservation(FixedPercentageStorageReservation):
    """What is kept free, and what every rank needs whatever the plan."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        super().__init__(cluster.reserved)
        self._common = workload.common_bytes()
        self._on_gpu = cluster.device_type == "cuda"

    def reserve(self, *arguments: Any, **named: Any) -> Topology:
        """The topology with what is left."""
        topology = super().reserve(*arguments, **named)
        for device in topology.devices:
            if self._on_gpu:
                device.storage.hbm -= self._common
            else:
                device.storage.ddr -= self._common
        return topology
