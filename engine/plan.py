"""Where the tables are: TorchRec's planner, or one sharding type for all."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType

from stampede.engine.processes import Processes
from stampede.optim.baselines import BASELINE_SHARDING_TYPES, BASELINES
from stampede.optim.sharded.supported import SHARDING_TYPES
from stampede.settings import SettingsError

# Columns; FBGEMM needs a multiple of 4.
SMALLEST_PARTITION = 4


def make_plan(
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    tables: list[str],
    sharding_types: Sequence[str],
    local_batch_size: int,
    processes: Processes,
) -> ShardingPlan:
    """A plan agreed by all ranks.

    Args:
        sharding_types: TorchRec's sharding types that the planner may choose from.
        local_batch_size: samples per rank, which the planner's estimates use.

    Raises:
        SettingsError: the tables do not fit, or not in this way.
    """
    constraints = {
        # Without a smallest width the planner does not split tables as narrow as a CTR model's.
        table: ParameterConstraints(
            sharding_types=list(sharding_types), min_partition=SMALLEST_PARTITION
        )
        for table in tables
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=processes.world_size,
            local_world_size=processes.local_world_size,
            compute_device=processes.device.type,
            ddr_cap=_machine_memory() // processes.local_world_size,
            hbm_cap=_device_memory(processes.device),
        ),
        constraints=constraints,
        batch_size=local_batch_size,
    )
    try:
        return processes.on_main(lambda: planner.plan(model, sharders))
    except PlannerError as failure:
        reason = str(failure).strip().splitlines()[0].strip()
        raise SettingsError(
            f"sharding.plan: {' or '.join(sharding_types)} gives no plan for "
            f"{processes.world_size} ranks: "
            f"{reason} Try another sharding.plan, more ranks, or smaller tables"
        ) from None


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


def _device_memory(device: torch.device) -> int | None:
    """Bytes of memory of a GPU; None on CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def describe_plan(plan: ShardingPlan) -> str:
    """How many tables are sharded in which way, e.g. `26 tables table_wise`."""
    kinds: dict[str, int] = {}
    for module in plan.plan.values():
        for parameter in module.values():
            kinds[parameter.sharding_type] = kinds.get(parameter.sharding_type, 0) + 1
    return ", ".join(f"{count} tables {kind}" for kind, count in sorted(kinds.items()))
