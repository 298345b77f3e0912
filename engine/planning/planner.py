"""Places the tables with TorchRec's planner, given the memory that our tables need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import ByteSize, TypeAdapter, ValidationError
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    Shard,
    ShardEstimator,
    ShardingOption,
    Stats,
    Storage,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType

from stampede.engine.config import Config
from stampede.engine.config.optim import IN_ORDER_SHARDING_TYPES
from stampede.engine.memory import memory_limit
from stampede.engine.planning.workload import Workload
from stampede.engine.processes import Processes
from stampede.optim.sharded.supported import SHARDING_TYPES
from stampede.settings import SettingsError

# Fewest columns of a shard; FBGEMM needs a multiple of 4. By default the planner would not split
# tables as narrow as a CTR model's.
_SMALLEST_PARTITION = 4

# Share of a GPU's memory kept for CUDA, NCCL and fragmentation: TorchRec's own default.
_RESERVED_OF_GPU = 0.15


def parse_bytes(text: str, option: str) -> int:
    """Bytes of a size such as `141GB` (10^9 each), `80GiB` (2^30 each) or `512MB`.

    Args:
        option: the command line option, for the message.

    Raises:
        SettingsError: it is not a size above 0.
    """
    # pydantic would also take numbers without a unit, and bits.
    if text.lower().endswith("b"):
        with suppress(ValidationError):
            size = TypeAdapter(ByteSize).validate_python(text)
            if size > 0:
                return size
    raise SettingsError(
        f"{option}: found {text!r}; write a number above 0 and a unit, such as 141GB (10^9 bytes) "
        "or 80GiB (2^30 bytes)"
    )


@dataclass(frozen=True)
class Cluster:
    """Identical devices, `local_world_size` of them in a node, each with `memory` bytes."""

    world_size: int
    local_world_size: int
    device_type: str
    memory: int

    @property
    def reserved(self) -> float:
        """Share of the memory kept free."""
        return _RESERVED_OF_GPU if self.device_type == "cuda" else 0.0

    @property
    def usable(self) -> int:
        """Bytes of a device that a run may take."""
        return int(self.memory * (1.0 - self.reserved))


def sharding_types(config: Config, world_size: int) -> Sequence[str]:
    """TorchRec's sharding types that the planner may choose from."""
    if config.sharding.plan != "auto":
        return [config.sharding.plan]
    if world_size == 1:
        # On one rank they are all the same; table-wise has the least overhead.
        return [ShardingType.TABLE_WISE.value]
    if config.train.reproducible:
        return IN_ORDER_SHARDING_TYPES
    return SHARDING_TYPES


def make_plan(
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    sharding_types: Sequence[str],
    workload: Callable[[], Workload],
    processes: Processes,
) -> ShardingPlan:
    """The plan of a run, made on rank 0 and the same on all ranks.

    Args:
        workload: returns what a step takes; called on rank 0 only.

    Raises:
        SettingsError: the tables do not fit with these sharding types.
    """
    world_size, node = processes.world_size, processes.local_world_size
    if processes.device.type == "cuda":
        memory = torch.cuda.get_device_properties(processes.device).total_memory
    else:
        memory = memory_limit() // node
    cluster = Cluster(world_size, node, processes.device.type, memory)
    return processes.on_main(
        lambda: search_plan(model, sharders, sharding_types, workload(), cluster)
    )


def describe_plan(plan: ShardingPlan) -> str:
    """The number of tables by sharding type, such as `26 tables table_wise`."""
    modules = plan.plan.values()
    kinds = Counter(table.sharding_type for module in modules for table in module.values())
    return ", ".join(f"{count} tables {kind}" for kind, count in sorted(kinds.items()))


def search_plan(
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    sharding_types: Sequence[str],
    workload: Workload,
    cluster: Cluster,
    stats: Stats | None = None,
) -> ShardingPlan:
    """The planner's choice; a SettingsError if the tables do not fit with these sharding types."""
    on_gpu = cluster.device_type == "cuda"
    constraints = {}
    for name, table in workload.tables.items():
        # Where rows are split, ranks add up parts of a bag: the bits depend on the ranks.
        whole = workload.reproducible and table.has_bags
        constraints[name] = ParameterConstraints(
            sharding_types=[ShardingType.TABLE_WISE.value] if whole else list(sharding_types),
            min_partition=_SMALLEST_PARTITION,
            pooling_factors=table.ids,
        )
    # TorchRec would take 0 bytes for its default.
    for_tables = max(1, cluster.usable - int(workload.common_bytes().sum()))
    topology = Topology(
        world_size=cluster.world_size,
        local_world_size=cluster.local_world_size,
        compute_device=cluster.device_type,
        **{"hbm_cap" if on_gpu else "ddr_cap": for_tables},
    )
    estimators = [EmbeddingPerfEstimator(topology, constraints), _Storage(workload, on_gpu)]
    planner = EmbeddingShardingPlanner(
        topology=topology,
        constraints=constraints,
        batch_size=workload.local_batch_size,
        enumerator=_Enumerator(topology, workload.local_batch_size, constraints, estimators),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        stats=stats or NoopEmbeddingStats(),
    )
    try:
        return planner.plan(model, sharders)
    except PlannerError as failure:
        reason = str(failure).strip().splitlines()[0].strip()
        raise SettingsError(
            f"sharding.plan: {' or '.join(sharding_types)} gives no plan for {cluster.world_size} "
            f"ranks: {reason} Try another sharding.plan, more ranks, or smaller tables"
        ) from None


class _Enumerator(EmbeddingEnumerator):
    """Puts the planner's options in the same order in every process.

    Among equal options the planner takes the first, and TorchRec's order comes from a set of
    strings. A restarted run must get the same plan: another one would round sums differently.
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
    """Bytes of shards, as `Workload` counts them; TorchRec does not know all our states."""

    def __init__(self, workload: Workload, on_gpu: bool) -> None:
        self._workload, self._on_gpu = workload, on_gpu

    def estimate(self, sharding_options: list[ShardingOption], *_: Any, **__: Any) -> None:
        """Write the bytes into the options; other arguments depend on TorchRec's version."""
        for option in sharding_options:
            for shard in option.shards:
                needed = int(shard_bytes(self._workload, option, shard).sum())
                shard.storage = Storage(needed, 0) if self._on_gpu else Storage(0, needed)


def shard_bytes(workload: Workload, option: ShardingOption, shard: Shard) -> np.ndarray:
    """Bytes of a shard of the planner's; see `Workload.shard_bytes`."""
    rows, columns = shard.size
    kind = option.sharding_type
    return workload.shard_bytes(option.name, kind, (rows, columns), shard.offset[1])
