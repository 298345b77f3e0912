"""Places the tables with TorchRec's planner, given the memory that our tables need."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    ShardEstimator,
    ShardingOption,
    Stats,
    Storage,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection

from stampede.engine.config import Config
from stampede.engine.config.optim import IN_ORDER_SHARDING_TYPES
from stampede.engine.console import readable_bytes
from stampede.engine.errors import DoesNotFitError
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

# Even the best plan is a little uneven: how much room a proposal leaves above an even share.
_UNEVEN = 1.05


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
    config: Config,
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    workload: Callable[[], Workload],
    processes: Processes,
) -> ShardingPlan:
    """The plan of a run, made on rank 0 and the same on all ranks.

    Args:
        workload: returns what a step takes; called on rank 0 only.

    Raises:
        DoesNotFitError: there is none, see `search_plan`.
    """
    world_size, node = processes.world_size, processes.local_world_size
    if processes.device.type == "cuda":
        memory = torch.cuda.get_device_properties(processes.device).total_memory
    else:
        memory = memory_limit() // node
    cluster = Cluster(world_size, node, processes.device.type, memory)
    return processes.on_main(lambda: search_plan(config, model, sharders, workload(), cluster))


def describe_plan(plan: ShardingPlan) -> str:
    """The number of tables by sharding type, such as `26 tables table_wise`."""
    modules = plan.plan.values()
    kinds = Counter(table.sharding_type for module in modules for table in module.values())
    return ", ".join(f"{count} tables {kind}" for kind, count in sorted(kinds.items()))


def search_plan(
    config: Config,
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    workload: Workload,
    cluster: Cluster,
    stats: Stats | None = None,
) -> ShardingPlan:
    """The planner's choice.

    Raises:
        DoesNotFitError: the tables do not fit with the sharding types of the configuration.
        SettingsError: TorchRec has this sharding type for pooled tables only.
    """
    _refuse_rows_apart(config.sharding.plan, model, sharders, cluster.device_type)
    on_gpu = cluster.device_type == "cuda"
    types = sharding_types(config, cluster.world_size)
    constraints = {}
    for name, table in workload.tables.items():
        # Where rows are split, ranks add up parts of a bag: the bits depend on the ranks.
        whole = config.train.reproducible and table.has_bags
        constraints[name] = ParameterConstraints(
            sharding_types=[ShardingType.TABLE_WISE.value] if whole else list(types),
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
        raise DoesNotFitError(
            f"sharding.plan={config.sharding.plan} gives no plan for {cluster.world_size} ranks: "
            f"{reason} {_shortfall(config.sharding.plan, workload, cluster)}"
        ) from None


def _refuse_rows_apart(
    plan: str, model: nn.Module, sharders: list[ModuleSharder[nn.Module]], device_type: str
) -> None:
    """TorchRec has fewer sharding types where it returns a row for each id."""
    collections = [one for one in model.modules() if isinstance(one, EmbeddingCollection)]
    if plan == "auto" or not collections:
        return
    sharder = next(one for one in sharders if one.module_type is EmbeddingCollection)
    offered = sharder.sharding_types(device_type)
    if plan not in offered:
        names = sorted({name for one in collections for name in one.embeddings})
        raise SettingsError(
            f"sharding.plan: found {plan!r}, which TorchRec does not have for tables of histories "
            f"(pooling: attention or none), here {', '.join(names)}; write auto, "
            f"{', '.join(offered[:-1])} or {offered[-1]}"
        )


def _shortfall(plan: str, work: Workload, cluster: Cluster) -> str:
    """How much memory a rank needs, and what to change."""
    own, usable, size = work.common_bytes().sum(), cluster.usable, readable_bytes
    even = own + work.table_bytes() / cluster.world_size
    tries = ["sharding.plan=auto"] if plan != "auto" else []
    # More ranks help if what each of them needs, whatever the plan, leaves room for tables.
    room, node = usable / _UNEVEN - own, cluster.local_world_size
    if room > 0 and (plan == "auto" or even > usable):
        ranks = math.ceil(work.table_bytes() / room / node) * node
        tries.append(f"{max(ranks, cluster.world_size + node)} ranks or more")
    if work.keeps_mean:
        tries.append("train.averaging=0")
    tries.append("an optimizer with less state (optim.embedding.optimizer=rowwise_adam)")
    return (
        f"Shared evenly, each rank would need {size(even)} of the {size(usable)} that a run may "
        f"take. Try {', '.join(tries)}, smaller tables, or a smaller model.dim or train.batch_size"
    )


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
                of_kinds = self._workload.shard_bytes(option.name, option.sharding_type, shard.size)
                needed = int(of_kinds.sum())
                shard.storage = Storage(needed, 0) if self._on_gpu else Storage(0, needed)
