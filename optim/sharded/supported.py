"""Refuses plans that tables with CowClip do not support: sharding, kernels, dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    CommOp,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, PoolingType

SHARDING_TYPES = (
    ShardingType.DATA_PARALLEL.value,
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.GRID_SHARD.value,
)

# Here TorchRec divides by the lengths of bags after the exchange, not in the lookup.
_BY_ROWS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


def compute_kernel(sharding_type: str) -> str:
    """The one kernel for tables of a sharding type."""
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        return EmbeddingComputeKernel.DENSE.value
    return EmbeddingComputeKernel.FUSED.value


def keeps_gradient_of_weights(sharding_types: set[str], env: ShardingEnv) -> bool:
    """Whether per-sample weights reach a collection's lookups unchanged, with their gradient."""
    if sharding_types == {ShardingType.TABLE_WISE.value}:
        return env.world_size == 1
    return sharding_types == {ShardingType.DATA_PARALLEL.value}


def check_environment(env: ShardingEnv) -> None:
    """Refuse sharding over only some of the processes."""
    if dist.is_initialized() and env.world_size != dist.get_world_size():
        raise ValueError(
            f"tables with CowClip: the model is sharded over {env.world_size} of "
            f"{dist.get_world_size()} processes (2D parallelism or a sub-group), which is not "
            "supported; shard it over all of them"
        )


def check_table(
    config: BaseEmbeddingConfig,
    plan: ParameterSharding,
    is_weighted: bool,
    registry: Mapping[str, QuantizedCommCodecs] | None,
) -> None:
    """Refuse what would not be exact.

    Args:
        is_weighted: whether the lookups have per-sample weights.
        registry: the sharder's codecs.
    """
    kind, pooling = plan.sharding_type, getattr(config, "pooling", None)
    kernel, by_rows = compute_kernel(kind), kind in _BY_ROWS
    is_grid, is_mean = kind == ShardingType.GRID_SHARD.value, pooling == PoolingType.MEAN
    # Where parts of bags are added up.
    codecs = (registry or {}).get(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name)
    both = () if codecs is None else (codecs.forward, codecs.backward)
    is_int8 = SparseType.INT8 in [getattr(codec, "_comm_precision", None) for codec in both]
    problem = None
    if is_mean and is_grid:
        problem = (
            "mean pooling under sharding type 'grid_shard' is not supported, TorchRec sums there "
            "instead; plan it with another sharding type, or write PoolingType.SUM"
        )
    elif is_mean and is_weighted and by_rows:
        problem = _weighted_mean(kind)
    elif plan.compute_kernel != kernel:
        problem = (
            f"compute kernel {plan.compute_kernel!r} is not supported; plan it with the kernel "
            f"{kernel!r}, in the memory of the device (pass cowclip_sharders() to the planner too)"
        )
    elif config.data_type not in (DataType.FP32, DataType.FP16, DataType.BF16):
        problem = (
            f"data type {config.data_type.name} is not supported; write DataType.FP32, "
            "DataType.FP16 or DataType.BF16"
        )
    elif pooling is not None and (by_rows or is_grid) and is_int8:
        problem = (
            f"under sharding type {kind!r} ranks add up parts of bags, which TorchRec cannot do in "
            "INT8; write CommType.FP16 or BF16 in QCommsConfig, or plan the table as table_wise or "
            "column_wise"
        )
    if problem is not None:
        raise ValueError(f"table {config.name!r} with CowClip: {problem}")


def _weighted_mean(kind: str) -> str:
    return (
        f"mean pooling with per-sample weights under sharding type {kind!r} is not supported, "
        "TorchRec divides by the sum of the weights there and by the number of ids elsewhere; "
        "plan it as table_wise, column_wise or data_parallel, or write PoolingType.SUM"
    )


def check_weights(
    configs: Iterable[BaseEmbeddingConfig], plan: Mapping[str, ParameterSharding]
) -> None:
    """Refuse the weights of a batch where TorchRec divides by them.

    Sharded collections use the weights of a batch even if they were built with `is_weighted=False`.

    Args:
        configs: of the tables with CowClip.
    """
    for config in configs:
        kind = plan[config.name].sharding_type
        if getattr(config, "pooling", None) == PoolingType.MEAN and kind in _BY_ROWS:
            raise ValueError(
                f"table {config.name!r} with CowClip: {_weighted_mean(kind)}, or leave the weights "
                "out of the KeyedJaggedTensor"
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
            f"planned as {plan[others[0]].sharding_type!r}: TorchRec then divides the second "
            "table's sums too. Plan all tables of the collection by rows, or no table with mean "
            "pooling"
        )
    for one, other in combinations(by_rows, 2) if means else ():
        shared = set(configs[one].feature_names) & set(configs[other].feature_names)
        if shared and {configs[one].pooling, configs[other].pooling} != {PoolingType.MEAN}:
            raise ValueError(
                f"tables {one!r} and {other!r} have the feature {min(shared)!r} in common under "
                f"sharding type {plan[one].sharding_type!r}, and table {means[0]!r} of the "
                "collection has mean pooling: TorchRec then divides by the lengths of other bags. "
                "Plan the tables as table_wise, column_wise or data_parallel, or give those with "
                "mean pooling a collection of their own"
            )
