"""TorchRec sharders under which tables with CowClipAdam are updated in their backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
)
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from stampede.optim.cowclip_adam import DEFAULT_LR, CowClipAdam, check_lr, update_settings
from stampede.optim.fused_tables import CowClipFusedOptimizer, CowClipTables
from stampede.optim.supported import EXACT_SHARDING_TYPES, check_table
from stampede.optim.table_init import TableInit, fill_shard_
from stampede.optim.update import UpdateSettings

# Key under which a table's settings travel through TorchRec's grouping of tables into TBEs.
_GROUP_KEY = "stampede"


def cowclip_sharders(
    init: TableInit | None = None, fused_params: dict[str, Any] | None = None
) -> list[ModuleSharder[nn.Module]]:
    """Sharders for `DistributedModelParallel` and TorchRec's planner.

    Tables whose parameters carry `CowClipAdam` (`apply_optimizer_in_backward`) get its update in
    their backward; other tables keep TorchRec's own optimizer. The planner is offered only the
    sharding types that are exact: table-wise, row-wise and table-row-wise.

    Args:
        init: distribution of the initial values of tables with CowClipAdam; they depend on
            (seed, table, row, column) only, not on the plan or the number of ranks. `None`:
            uniform in TorchRec's default range, or a table's own `init_fn`, which then depends on
            the plan.
        fused_params: passed on to TorchRec's sharder.

    Example::

        apply_optimizer_in_backward(
            CowClipAdam, model.ebc.parameters(), {"lr": 1e-4, "l2": 1e-5, "clip": CowClip()}
        )
        model = DistributedModelParallel(model, device=device, sharders=cowclip_sharders())
    """
    return [CowClipEmbeddingBagCollectionSharder(init, fused_params)]


class CowClipEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards `EmbeddingBagCollection`; see `cowclip_sharders`."""

    def __init__(self, init: TableInit | None, fused_params: dict[str, Any] | None = None) -> None:
        super().__init__(fused_params=fused_params)
        self._init = init

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Only the exact ones, on every device (TorchRec offers no row-wise on CPU)."""
        return list(EXACT_SHARDING_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Only tables that lie whole in the device's memory."""
        return [EmbeddingComputeKernel.FUSED.value]

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """The tables, as the planner is to see them: those with CowClipAdam as Adam's.

        The planner counts the state of a closed list of optimizers; Adam keeps the same two
        moments.
        """
        seen = {}
        for name, parameter in super().shardable_parameters(module).items():
            if _has_cowclip(parameter):
                shown = nn.Parameter(parameter.detach(), parameter.requires_grad)
                shown.__dict__.update(parameter.__dict__)
                shown._optimizer_classes = [torch.optim.Adam]
                parameter = shown
            seen[name] = parameter
        return seen

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> CowClipShardedEmbeddingBagCollection:
        """Shard the collection.

        Raises:
            ValueError: a table's plan, width or dtype is not supported with CowClipAdam, or one
                of its settings is out of range.
        """
        configs = {config.name: config for config in module.embedding_bag_configs()}
        settings: dict[str, UpdateSettings] = {}
        parameters = super().shardable_parameters(module)
        for name, parameter in parameters.items():
            if _has_cowclip(parameter):
                arguments = parameter._optimizer_kwargs[0]
                check_lr(arguments.get("lr", DEFAULT_LR))
                settings[name] = update_settings(arguments)
                check_table(configs[name], params[name], settings[name])
        with _as_fbgemm_sgd(parameters, settings):
            return CowClipShardedEmbeddingBagCollection(
                module=module,
                table_name_to_parameter_sharding=params,
                env=env,
                init=self._init,
                fused_params=self.fused_params,
                device=device,
                module_fqn=module_fqn,
            )

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        """What `shard` returns."""
        return CowClipShardedEmbeddingBagCollection


class CowClipShardedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """A sharded collection in which tables with CowClipAdam are `CowClipTables`.

    Args:
        init: distribution of the initial values.
        **arguments: those of `ShardedEmbeddingBagCollection`.
    """

    def __init__(self, *, init: TableInit | None, **arguments: Any) -> None:
        # TorchRec's constructor calls reset_parameters, which reads them.
        self._table_init = init
        self._own_init = frozenset(
            config.name
            for config in arguments["module"].embedding_bag_configs()
            if not _is_default_init(config)
        )
        super().__init__(**arguments)

    def _create_lookups(self) -> None:
        settings: dict[int, UpdateSettings] = {}
        for sharding in self._embedding_shardings:
            for config in chain.from_iterable(sharding._grouped_embedding_configs_per_rank):
                group = (config.fused_params or {}).pop(_GROUP_KEY, None)
                if group is not None:
                    settings[id(config)] = group[0]
        super()._create_lookups()
        for kernel in self._fused_kernels():
            if id(kernel.config) in settings:
                tables = CowClipTables.adopt(kernel.emb_module, settings[id(kernel.config)])
                kernel._optim = CowClipFusedOptimizer(kernel.config, tables, kernel._pg)

    def update_shards(self, *_: Any, **__: Any) -> None:
        """Refused: TorchRec would rebuild the lookups without the settings."""
        raise ValueError(
            "tables with CowClipAdam cannot be resharded in place; save a checkpoint and shard a "
            "new model with the other plan"
        )

    def reset_parameters(self) -> None:
        """Give all tables their initial values; TorchRec calls it when everything is built."""
        super().reset_parameters()
        for kernel in self._fused_kernels():
            if isinstance(kernel.emb_module, CowClipTables):
                _fill_tables(
                    kernel.config,
                    kernel.emb_module,
                    self._table_init or TableInit(),
                    keep=self._own_init if self._table_init is None else frozenset(),
                )

    def cowclip_tables(self) -> list[CowClipTables]:
        """The tables of this rank that CowClipAdam updates."""
        tables = [kernel.emb_module for kernel in self._fused_kernels()]
        return [tbe for tbe in tables if isinstance(tbe, CowClipTables)]

    def _fused_kernels(self) -> Iterator[BatchedFusedEmbeddingBag]:
        for lookup in self._lookups:
            for kernel in getattr(lookup, "_emb_modules", []):
                if isinstance(kernel, BatchedFusedEmbeddingBag):
                    yield kernel


def local_cowclip_tables(model: nn.Module) -> list[CowClipTables]:
    """All `CowClipTables` of this rank in a model, in the order of its modules."""
    return [
        tables
        for module in model.modules()
        if isinstance(module, CowClipShardedEmbeddingBagCollection)
        for tables in module.cowclip_tables()
    ]


def _has_cowclip(parameter: nn.Parameter) -> bool:
    return CowClipAdam in getattr(parameter, "_optimizer_classes", [])


@contextmanager
def _as_fbgemm_sgd(
    parameters: dict[str, nn.Parameter], settings: dict[str, UpdateSettings]
) -> Iterator[None]:
    """Show TorchRec plain SGD, the fused optimizer without state, for tables with CowClipAdam.

    TorchRec knows a closed list of optimizers. It groups tables by what they are given, so the
    settings and the width go along and every TBE ends up with one of each.
    """
    saved = {
        name: (parameters[name]._optimizer_classes, parameters[name]._optimizer_kwargs)
        for name in settings
    }
    try:
        for name, setting in settings.items():
            parameter = parameters[name]
            lr = parameter._optimizer_kwargs[0].get("lr", DEFAULT_LR)
            parameter._optimizer_classes = [torch.optim.SGD]
            parameter._optimizer_kwargs = [
                {"lr": float(lr), _GROUP_KEY: (setting, parameter.shape[1])}
            ]
        yield
    finally:
        for name, (classes, arguments) in saved.items():
            parameters[name]._optimizer_classes = classes
            parameters[name]._optimizer_kwargs = arguments


def _is_default_init(config: BaseEmbeddingConfig) -> bool:
    """Whether TorchRec set `init_fn` itself: uniform within the range of the config."""
    function = config.init_fn
    bounds = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    return getattr(function, "func", None) is nn.init.uniform_ and function.keywords == bounds


def _fill_tables(
    config: GroupedEmbeddingConfig,
    tables: CowClipTables,
    init: TableInit,
    keep: frozenset[str],
) -> None:
    """Give this rank's shards their initial values, but for the tables named in `keep`."""
    for table, weights in zip(
        config.embedding_tables, tables.split_embedding_weights(), strict=True
    ):
        if table.name in keep:
            continue
        row_offset, column_offset = table.local_metadata.shard_offsets
        fill_shard_(
            weights,
            init,
            table=table.name,
            row_offset=row_offset,
            column_offset=column_offset,
            dim=table.embedding_dim,
            low=table.get_weight_init_min(),
            high=table.get_weight_init_max(),
        )
