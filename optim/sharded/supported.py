"""What a table with CowClip may be: sharding types, kernels, widths, dtypes."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, PoolingType

from stampede.optim.settings import UpdateSettings

SHARDING_TYPES = (
    ShardingType.DATA_PARALLEL.value,
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.GRID_SHARD.value,
)

# TorchRec divides by the lengths of bags after the exchange there, not in the lookup.
_BY_ROWS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


def compute_kernel(sharding_type: str) -> str:
    """The one kernel that tables of a sharding type are planned with."""
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        return EmbeddingComputeKernel.DENSE.value
    return EmbeddingComputeKernel.FUSED.value


def keeps_gradient_of_weights(sharding_types: set[str], env: ShardingEnv) -> bool:
    """Whether per-sample weights reach the lookups of a collection as they were given."""
    if sharding_types == {ShardingType.TABLE_WISE.value}:
        return env.world_size == 1
    return sharding_types == {ShardingType.DATA_PARALLEL.value}


def check_environment(env: ShardingEnv) -> None:
    """Refuse sharding over a part of the processes."""
    if dist.is_initialized() and env.world_size != dist.get_world_size():
        raise ValueError(
            f"tables with CowClip: the model is sharded over {env.world_size} of "
            f"{dist.get_world_size()} processes (2D parallelism or a sub-group), which is not "
            "supported; shard it over all of them"
        )


def check_table(
    config: BaseEmbeddingConfig,
    plan: ParameterSharding,
    settings: UpdateSettings,
    is_weighted: bool = False,
) -> None:
    """Refuse what would not be exact, before anything is built.

    Args:
        is_weighted: whether the lookups have per-sample weights.
    """
    table = f"table {config.name!r} with CowClip"
    if plan.sharding_type not in SHARDING_TYPES:
        raise ValueError(
            f"{table}: sharding type {plan.sharding_type!r} is not supported; plan it as one of "
            f"{', '.join(SHARDING_TYPES)}"
        )
    if getattr(config, "pooling", None) == PoolingType.MEAN:
        _check_mean_pooling(table, plan.sharding_type, is_weighted)
    kernel = compute_kernel(plan.sharding_type)
    if plan.compute_kernel != kernel:
        raise ValueError(
            f"{table}: compute kernel {plan.compute_kernel!r} is not supported; plan it with the "
            f"kernel {kernel!r}, in the memory of the device (pass cowclip_sharders() to the "
            "planner too)"
        )
    if config.embedding_dim % 4:
        padded = -(-config.embedding_dim // 4) * 4
        raise ValueError(
            f"{table}: embedding_dim {config.embedding_dim} is not a multiple of 4, which FBGEMM "
            f"needs; write embedding_dim={padded} with CowClip(columns={config.embedding_dim}) "
            f"and use the first {config.embedding_dim} columns"
        )
    for shard in plan.sharding_spec.shards if plan.sharding_spec is not None else ():
        if shard.shard_sizes[1] % 4:
            raise ValueError(
                f"{table}: a shard of the plan has {shard.shard_sizes[1]} columns, not a multiple "
                "of 4, which FBGEMM needs; give the planner "
                "ParameterConstraints(min_partition=4) or another multiple of 4"
            )
    if config.data_type not in (DataType.FP32, DataType.FP16, DataType.BF16):
        raise ValueError(
            f"{table}: data type {config.data_type.name} is not supported; write DataType.FP32, "
            "DataType.FP16 or DataType.BF16"
        )
    if settings.clip.columns and settings.clip.columns > config.embedding_dim:
        raise ValueError(
            f"{table}: CowClip(columns={settings.clip.columns}) is more than its embedding_dim "
            f"{config.embedding_dim}"
        )


def check_collection(
    configs: Mapping[str, BaseEmbeddingConfig], plan: Mapping[str, ParameterSharding]
) -> None:
    """Refuse combinations of tables that TorchRec pools wrongly."""
    by_rows = [name for name in configs if plan[name].sharding_type in _BY_ROWS]
    others = [name for name in configs if name not in by_rows]
    means = [
        name for name in by_rows if getattr(configs[name], "pooling", None) == PoolingType.MEAN
    ]
    if means and others:
        raise ValueError(
            f"table {means[0]!r} has mean pooling under sharding type "
            f"{plan[means[0]].sharding_type!r}, and table {others[0]!r} of the same collection is "
            f"planned as {plan[others[0]].sharding_type!r}: TorchRec then divides the sums of the "
            "second too. Plan all tables of the collection by rows, or none of those with mean "
            "pooling"
        )


def _check_mean_pooling(table: str, sharding_type: str, is_weighted: bool) -> None:
    """Refuse mean pooling where TorchRec's lookup computes something else."""
    if sharding_type == ShardingType.GRID_SHARD.value:
        raise ValueError(
            f"{table}: mean pooling under sharding type 'grid_shard' is not supported, TorchRec "
            "sums there instead; plan it with another sharding type, or write PoolingType.SUM"
        )
    if is_weighted and sharding_type in _BY_ROWS:
        raise ValueError(
            f"{table}: mean pooling with per-sample weights under sharding type "
            f"{sharding_type!r} is not supported, TorchRec divides by the sum of the weights there "
            "and by the number of ids elsewhere; plan it as table_wise, column_wise or "
            "data_parallel, or write PoolingType.SUM"
        )
