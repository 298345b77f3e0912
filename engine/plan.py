"""Where the tables are: TorchRec's planner, or one sharding type for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType

from stampede.engine.planning.planner import Cluster, search_plan
from stampede.engine.planning.workload import Workload
from stampede.engine.processes import Processes
from stampede.optim.baselines import BASELINE_SHARDING_TYPES, BASELINES
from stampede.optim.sharded.supported import SHARDING_TYPES
from stampede.settings import SettingsError


def make_plan(
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    sharding_types: Sequence[str],
    workload: Callable[[], Workload],
    processes: Processes,
) -> ShardingPlan:
    """A plan agreed by all ranks.

    Args:
        sharding_types: TorchRec's sharding types that the planner may choose from.
        workload: what a step takes; called on rank 0.

    Raises:
        SettingsError: the tables do not fit, or not in this way.
    """
    on_gpu = processes.device.type == "cuda"
    cluster = Cluster(
        processes.world_size,
        processes.local_world_size,
        processes.device.type,
        _device_memory(processes.device)
        if on_gpu
        else _machine_memory() // processes.local_world_size,
    )

    try:
        return processes.on_main(
            lambda: search_plan(model, sharders, sharding_types, workload(), cluster)
        )
    except PlannerError as failure:
        raise no_plan(sharding_types, processes.world_size, failure) from None


def no_plan(sharding_types: Sequence[str], world_size: int, failure: PlannerError) -> SettingsError:
    """What to say where the planner finds none."""
    reason = str(failure).strip().splitlines()[0].strip()
    return SettingsError(
        f"sharding.plan: {' or '.join(sharding_types)} gives no plan for {world_size} ranks: "
        f"{reason} Try another sharding.plan, more ranks, or smaller tables"
    )


def sharding_types(plan: str, optimizer: str, world_size: int) -> Sequence[str]:
    """The sharding types that `sharding.plan` leaves to the planner.

    Args:
        plan: `auto` for the planner's own choice, or a TorchRec sharding type.
        optimizer: `optim.embedding.optimizer`.
    """
    if plan != "auto":
        return [plan]
    if world_size == 1:
        # On one rank all types hold the same tables; table-wise has the least overhead.
        return [ShardingType.TABLE_WISE.value]
    return BASELINE_SHARDING_TYPES if optimizer in BASELINES else SHARDING_TYPES


def _machine_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_memory(device: torch.device) -> int:
    """Bytes of memory of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory


def describe_plan(plan: ShardingPlan) -> str:
    """How many tables are sharded in which way, e.g. `26 tables table_wise`."""
    kinds: dict[str, int] = {}
    for module in plan.plan.values():
        for parameter in module.values():
            kinds[parameter.sharding_type] = kinds.get(parameter.sharding_type, 0) + 1
    return ", ".join(f"{count} tables {kind}" for kind, count in sorted(kinds.items()))
