"""Fused and data-parallel tables as TorchRec knows them: kernel, lookup, optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import embedding as torchrec_sequence
from torchrec.distributed import embeddingbag as torchrec_pooled
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BaseBatchedEmbeddingBag,
    BaseEmbedding,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.modules.embedding_configs import data_type_to_sparse_type
from torchrec.optim.fused import FusedOptimizer

from stampede.optim.sharded.delta_tracker import check_tracking, record_states
from stampede.optim.sharded.tables import CowClipTables
from stampede.optim.table_array import TableShard
from stampede.optim.update_settings import UpdateSettings

# A shard of a table, with its weights and states by name.
_Shard = tuple[ShardedEmbeddingTable, dict[str, Tensor]]


class CowClipFusedOptimizer(EmbeddingFusedOptimizer):
    """The optimizer of tables.

    Weights, and states shaped like the table, are sharded like it. States with one value a row are
    sharded by rows, each row once, even if the table is split by columns. Tables that every rank
    holds a copy of have plain tensors. The step counter, `<table>.step`, is one number. So a
    checkpoint can be read under another sharding plan.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        tables: CowClipTables,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        # TorchRec's methods hand learning rate and step to `_emb_module`.
        self._tables = self._emb_module = tables
        params, state = {}, {}
        for name, run in groupby(_shards(config, tables), key=lambda shard: shard[0].name):
            shards = list(run)
            values = shards[0][1]
            if not tables.is_replicated:
                values = {key: _sharded(shards, key, pg) for key in values}
            params[f"{name}.weight"] = weight = values.pop("weight")
            values["step"] = tables.step_count
            state[weight] = {f"{name}.{key}": value for key, value in values.items()}
        tables.seen_rate = tables.get_learning_rate()
        group = {"params": list(params.values()), "lr": tables.seen_rate}
        # EmbeddingFusedOptimizer's constructor repeats states of rows for each column shard, and
        # asks replicated tables for shards.
        FusedOptimizer.__init__(self, params, state, [group])
        tables.of_torchrec = weakref.ref(self)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Set the learning rate, `lr`."""
        super().update_hyper_parameters(params_dict)
        if "lr" in params_dict:
            self.param_groups[0]["lr"] = params_dict["lr"]

    @property
    def state(self) -> Mapping[Any, Any]:
        """The state by parameter, see `FusedOptimizer`; reading it brings the tables up to date."""
        self._tables.flush()
        return self._state

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self._state = state


def _shards(config: GroupedEmbeddingConfig, tables: CowClipTables) -> Iterator[_Shard]:
    """Every shard of a group's tables."""
    weights = tables.split_embedding_weights()
    shards = zip(config.embedding_tables, weights, tables.shard_states(), strict=True)
    for table, weight, (_, states) in shards:
        yield table, {"weight": weight, **states}


def _sharded(shards: Sequence[_Shard], key: str, pg: dist.ProcessGroup | None) -> ShardedTensor:
    """One of the values of a table, from this rank's shards of it."""
    table, values = shards[0]
    everywhere = table.global_metadata.shards_metadata
    local = [(values[key], table.local_metadata) for table, values in shards]
    size = table.num_embeddings, table.embedding_dim
    if values[key].ndim == 1:
        everywhere = [_rows_of(part) for part in everywhere if part.shard_offsets[1] == 0]
        local = [(value, _rows_of(part)) for value, part in local if part.shard_offsets[1] == 0]
        size = size[:1]
    metadata = ShardedTensorMetadata(
        shards_metadata=everywhere,
        size=torch.Size(size),
        tensor_properties=TensorProperties(dtype=values[key].dtype),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=[Shard(value, part) for value, part in local],
        sharded_tensor_metadata=metadata,
        process_group=pg,
    )


def _rows_of(shard: ShardMetadata) -> ShardMetadata:
    return ShardMetadata(
        shard_offsets=shard.shard_offsets[:1],
        shard_sizes=shard.shard_sizes[:1],
        placement=shard.placement,
    )


# Key in a table's arguments of FBGEMM under which its settings travel to its kernel. TorchRec looks
# up tables together only if all their arguments agree.
GROUP_KEY = "stampede"


def shards_of(config: GroupedEmbeddingConfig, names: Mapping[str, str]) -> list[TableShard]:
    """The shards of a group's tables; replicated ones count on the first rank."""
    shards = []
    for table in config.embedding_tables:
        name = names.get(table.name, table.name)
        if table.local_metadata is None:
            first = not dist.is_initialized() or dist.get_rank() == 0
            shards.append(TableShard(name, table.local_rows, counted=first))
        else:
            offsets = table.local_metadata.shard_offsets
            shards.append(TableShard(name, table.local_rows, *offsets))
    return shards


class CowClipKernel:
    """A kernel of TorchRec's around `CowClipTables`; mixed into its fused kernels.

    Data-parallel tables have it too. Plans call it `fused` or `dense`. TorchRec has the name
    `customized_kernel` (meta-pytorch/torchrec#2887), but its planner refuses that, and its
    collections then have no `state_dict()` and, on ranks without a shard, no parameter of a table.
    """

    def _build(self, names: Mapping[str, str], device: torch.device | None) -> None:
        """Make the tables, with their names in sums and random numbers, and their optimizer."""
        config = self._config
        tables, arguments = config.embedding_tables, dict(config.fused_params)
        settings, dim = arguments.pop(GROUP_KEY)
        self._emb_module = CowClipTables(
            shards_of(config, names),
            self._local_cols,
            settings,
            dim,
            device=device or torch.device("cpu"),
            features=config.feature_names(),
            is_replicated=tables[0].local_metadata is None,
            feature_table_map=self._feature_table_map,
            pooling_mode=getattr(self, "_pooling", PoolingMode.NONE),
            weights_precision=data_type_to_sparse_type(config.data_type),
            table_names=[table.name for table in tables],
            **arguments,
        )
        self._optim = CowClipFusedOptimizer(config, self._emb_module, self._pg)
        self.init_parameters()

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """None: tables are parameters of the collection, and not for DDP."""
        yield from ()

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The tables, each with all its shards, marked so that no other optimizer takes them."""
        first = 0
        for name, shards in self.table_name_to_count.items():
            parameter = self._emb_module.parameter(first, shards)
            parameter._in_backward_optimizers = [self._optim]
            yield name, parameter
            first += shards


class CowClipEmbeddingBag(CowClipKernel, BatchedFusedEmbeddingBag):
    """Pooled embeddings."""

    def __init__(
        self, names: Mapping[str, str], config: Any, device: Any, pg: Any, kind: Any, _: Any
    ) -> None:
        # The constructor of the fused kernel would make tables of FBGEMM's.
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device, kind)
        self._build(names, device)


class CowClipEmbedding(CowClipKernel, BatchedFusedEmbedding):
    """Sequence embeddings."""

    def __init__(self, names: Mapping[str, str], config: Any, pg: Any, device: Any, _: Any) -> None:
        BaseBatchedEmbedding.__init__(self, config, pg, device)
        self._build(names, device)


class CowClipLookup:
    """Common parts of TorchRec's lookups with our kernel for tables with CowClip."""

    _kernel: Callable[..., BaseEmbedding]

    def __init__(
        self, names: Mapping[str, str], settings: Mapping[str, UpdateSettings], **arguments: Any
    ) -> None:
        self._names, self._settings = names, settings
        super().__init__(**arguments)

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, *arguments: Any
    ) -> BaseEmbedding:
        if GROUP_KEY in (config.fused_params or ()):
            return self._kernel(self._names, config, *arguments)
        return super()._create_embedding_kernel(config, *arguments)

    def register_optim_state_tracker_fn(self, record_fn: Callable[..., None]) -> None:
        """Let a tracker record optimizer states; TorchRec's own way allows one table a lookup."""
        check_tracking(record_fn, self._settings)
        super().register_optim_state_tracker_fn(partial(record_states, record_fn, CowClipTables))

    @property
    def module(self) -> CowClipLookup:
        """TorchRec takes every data-parallel lookup for one inside DDP."""
        return self

    def reduces_all(self) -> bool:
        """Whether all its tables have CowClip, so that DDP has nothing to reduce."""
        return all(isinstance(kernel, CowClipKernel) for kernel in self._emb_modules)

    def hide_from_ddp(self) -> None:
        """Let DDP leave out the tables with CowClip."""
        names = [
            f"{path}.{name}"
            for path, module in self.named_modules()
            if isinstance(module, CowClipTables)
            for name in module._parameters
        ]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)


class CowClipPooledLookup(CowClipLookup, GroupedPooledEmbeddingsLookup):
    """A lookup of pooled embeddings."""

    _kernel = CowClipEmbeddingBag


class CowClipSequenceLookup(CowClipLookup, GroupedEmbeddingsLookup):
    """A lookup of sequence embeddings."""

    _kernel = CowClipEmbedding


class _DDP(DistributedDataParallel):
    def __new__(cls, module: nn.Module, *_: Any, **__: Any) -> nn.Module:
        is_ours = isinstance(module, CowClipLookup) and module.reduces_all()
        return module if is_ours else super().__new__(cls)


@contextmanager
def ddp_without_cowclip() -> Iterator[None]:
    """While active, TorchRec 1.6 builds lookups of tables with CowClip outside DDP.

    The hook is `init_data_parallel`, which collections have since TorchRec 1.7; 1.6 names DDP in
    the middle of their constructors (meta-pytorch/torchrec#1829 asks why). DDP itself refuses a
    module that has no parameter to reduce.
    """
    has_hook = hasattr(torchrec_pooled.ShardedEmbeddingBagCollection, "init_data_parallel")
    users = () if has_hook else (torchrec_pooled, torchrec_sequence)
    try:
        for user in users:
            user.DistributedDataParallel = _DDP
        yield
    finally:
        for user in users:
            user.DistributedDataParallel = DistributedDataParallel
