"""What a table with CowClipAdam may be: sharding types, kernel, width, dtype."""

from __future__ import annotations

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from stampede.optim.update import UpdateSettings

# Sharding types under which one rank holds whole rows and so sees a row's whole gradient.
EXACT_SHARDING_TYPES = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
)


def check_table(
    config: BaseEmbeddingConfig, plan: ParameterSharding, settings: UpdateSettings
) -> None:
    """Refuse what would not be exact, before anything is built.

    Raises:
        ValueError: one sentence with the table, what was found and what to write instead.
    """
    table = f"table {config.name!r} with CowClipAdam"
    if plan.sharding_type not in EXACT_SHARDING_TYPES:
        raise ValueError(
            f"{table}: sharding type {plan.sharding_type!r} is not supported; plan it as one of "
            f"{', '.join(EXACT_SHARDING_TYPES)} (pass cowclip_sharders() to the planner too)"
        )
    if plan.compute_kernel != EmbeddingComputeKernel.FUSED.value:
        raise ValueError(
            f"{table}: compute kernel {plan.compute_kernel!r} is not supported; "
            f"plan it with the kernel {EmbeddingComputeKernel.FUSED.value!r}"
        )
    if config.embedding_dim % 4:
        padded = -(-config.embedding_dim // 4) * 4
        raise ValueError(
            f"{table}: embedding_dim {config.embedding_dim} is not a multiple of 4, which FBGEMM "
            f"needs; write embedding_dim={padded} with CowClip(columns={config.embedding_dim}) "
            f"and use the first {config.embedding_dim} columns"
        )
    if config.data_type != DataType.FP32:
        raise ValueError(
            f"{table}: data type {config.data_type.name} is not supported; write DataType.FP32"
        )
    if settings.clip and settings.clip.columns and settings.clip.columns > config.embedding_dim:
        raise ValueError(
            f"{table}: CowClip(columns={settings.clip.columns}) is more than its embedding_dim "
            f"{config.embedding_dim}"
        )
