"""TorchRec's view of the tables' optimizer: learning rate, state, step counter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.optim.fused import FusedOptimizer

from stampede.optim.sharded.tables import CowClipTables


class _UpToDate:
    """Whoever asks for the state finds all steps taken."""

    _tables: CowClipTables

    @property
    def state(self) -> Mapping[Any, Any]:
        """By parameter, see `FusedOptimizer`."""
        self._tables.flush()
        return self._state

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self._state = state


class CowClipFusedOptimizer(_UpToDate, EmbeddingFusedOptimizer):
    """The optimizer of sharded tables.

    States shaped like the table are sharded like it. States with one value a row are sharded by
    rows, each row once, also where the table is split by columns. The step counter,
    `<table>.step`, is one number. So a checkpoint can be read under another sharding plan.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        tables: CowClipTables,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        self._tables = tables
        super().__init__(config, tables, pg)
        row_states = _row_states(config, tables, pg)
        for name, weight in self.params.items():
            table = name.removesuffix(".weight")
            self.state[weight] |= row_states[table]
            self.state[weight][f"{table}.step"] = tables.step_count


class ReplicatedFusedOptimizer(_UpToDate, FusedOptimizer):
    """The optimizer of tables that every rank holds a copy of; the same keys, plain tensors."""

    def __init__(self, config: GroupedEmbeddingConfig, tables: CowClipTables) -> None:
        self._tables = tables
        params, state = {}, {}
        for table, weight, (_, states) in zip(
            config.embedding_tables,
            tables.split_embedding_weights(),
            tables.shard_states(),
            strict=True,
        ):
            params[f"{table.name}.weight"] = weight
            named = {
                f"{table.name}.{_key(name, position)}": values
                for position, (name, values) in enumerate(states.items())
            }
            state[weight] = {**named, f"{table.name}.step": tables.step_count}
        group = {"params": list(params.values()), "lr": tables.get_learning_rate()}
        super().__init__(params, state, [group])

    def step(self, closure: Any = None) -> None:
        """Hand the learning rate to the tables; they are updated in backward."""
        self._tables.set_learning_rate(self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As `step`, like TorchRec's fused optimizers."""
        self.step()

    def set_optimizer_step(self, step: int) -> None:
        """See `CowClipTables`."""
        self._tables.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, float]) -> None:
        """See `CowClipTables`."""
        self._tables.update_hyper_parameters(params_dict)


def _key(name: str, position: int) -> str:
    # TorchRec calls the first state of every fused optimizer so.
    return "momentum1" if position == 0 else name


def _row_states(
    config: GroupedEmbeddingConfig, tables: CowClipTables, pg: dist.ProcessGroup | None
) -> dict[str, dict[str, ShardedTensor]]:
    """By table, its states with one value a row."""
    shards: dict[str, dict[str, list[Shard]]] = {}
    configs: dict[str, ShardedEmbeddingTable] = {}
    for table, (shard, states) in zip(config.embedding_tables, tables.shard_states(), strict=True):
        configs[table.name] = table
        of_table = shards.setdefault(table.name, {})
        for position, (name, values) in enumerate(states.items()):
            if values.ndim == 1:
                local = of_table.setdefault(_key(name, position), [])
                if shard.column_offset == 0:
                    local.append(Shard(values, _row_metadata(table.local_metadata)))
    return {
        name: {
            f"{name}.{key}": _sharded_by_rows(configs[name], local, pg)
            for key, local in of_table.items()
        }
        for name, of_table in shards.items()
    }


def _sharded_by_rows(
    table: ShardedEmbeddingTable, local: list[Shard], pg: dist.ProcessGroup | None
) -> ShardedTensor:
    everywhere = [
        _row_metadata(shard)
        for shard in table.global_metadata.shards_metadata
        if shard.shard_offsets[1] == 0
    ]
    metadata = ShardedTensorMetadata(
        shards_metadata=everywhere,
        size=torch.Size([table.num_embeddings]),
        tensor_properties=TensorProperties(dtype=torch.float32),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=local, sharded_tensor_metadata=metadata, process_group=pg
    )


def _row_metadata(shard: ShardMetadata) -> ShardMetadata:
    return ShardMetadata(
        shard_offsets=shard.shard_offsets[:1],
        shard_sizes=shard.shard_sizes[:1],
        placement=shard.placement,
    )
