# pyright: basic
"""Sharded collections in which tables with CowClip are updated in backward."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, KJTList
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.twrw_sharding import TwRwSparseFeaturesDist
from torchrec.distributed.types import Awaitable, BoundsCheckMode, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.optim.backends import choose_backend
from stampede.optim.sharded.backward_update import BackwardUpdate
from stampede.optim.sharded.delta_tracker import check_tracking
from stampede.optim.sharded.id_check import CheckBeforeSending, Use
from stampede.optim.sharded.reduction import blocks_split_by_columns
from stampede.optim.sharded.supported import check_weights, keeps_gradient_of_weights
from stampede.optim.sharded.tables import NOT_COMPILED, CowClipTables
from stampede.optim.sharded.torchrec_kernel import (
    GROUP_KEY,
    CowClipKernel,
    CowClipPooledLookup,
    CowClipSequenceLookup,
    ddp_without_cowclip,
    shards_of,
)
from stampede.optim.sharded.variable_batch import repeat_bags
from stampede.optim.table_init import TableInit, fill_shard_
from stampede.optim.update_settings import UpdateSettings

_Fused = BatchedFusedEmbeddingBag | BatchedFusedEmbedding
# Typed so, since a mixin uses attributes of the class that it is mixed into.
_Mixin: Any = object


class _WithoutOptimizers:
    """A collection whose tables with CowClip show no optimizer: TorchRec takes FBGEMM's only."""

    def __init__(self, module: nn.Module, tables: Container[str]) -> None:
        self._module, self._tables = module, tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for path, parameter in self._module.named_parameters():
            if path.split(".")[-2] in self._tables:
                parameter = nn.Parameter(parameter.detach(), parameter.requires_grad)
            yield path, parameter


class CowClipCollection(_Mixin):
    """Common parts of pooled and sequence collections; mixed into TorchRec's classes."""

    def __init__(
        self,
        *,
        settings: dict[str, UpdateSettings],
        rates: dict[str, float],
        init: TableInit | Mapping[str, TableInit] | None,
        owner: BackwardUpdate,
        **arguments: Any,
    ) -> None:
        # TorchRec's constructor calls the methods below, which read these.
        self._settings, self._rates = settings, rates
        self._table_init = init
        self.owner = owner
        given = arguments["fused_params"] or {}
        self._bounds_check = given.get("bounds_check_mode", BoundsCheckMode.WARNING)
        self._names = {table: f"{arguments['module_fqn'] or ''}.{table}" for table in settings}
        with ddp_without_cowclip():
            super().__init__(**arguments)
        if settings and (self._device is None or self._device.type != "meta"):
            moving = {t: setting for t, setting in settings.items() if not setting.rule.is_frozen}
            plan = {table: self.module_sharding_plan[table] for table in moving}
            number = owner.add_collection(
                self,
                [tbe for tbe in self.cowclip_tables() if not tbe.is_frozen],
                blocks_split_by_columns(plan, self._names),
                {self._names[table]: setting for table, setting in moving.items()},
                self._env,
                self._device or torch.device("cpu"),
            )
            settle = partial(owner.check_queued, up_to_now=True)
            flag = owner.queue_of(number)
            self._optim.register_step_post_hook(lambda *_: owner.after_step())
            for tbe in self.cowclip_tables():
                tbe.settle = settle
                stops = None if tbe.is_frozen else flag
                tbe.backends = [
                    choose_backend(array, defers=True, flag=stops) for array in tbe.arrays
                ]
            # On every rank, whether it has tables or not.
            self.register_state_dict_pre_hook(lambda *_: settle())
            # A load may replace only the weights: take all pending steps before it.
            self._register_load_state_dict_pre_hook(lambda *_: self._flush())
            self.number = number
            for module, lookup in enumerate(self._unwrapped_lookups()):
                # On every rank, whether it has tables or not.
                lookup.register_forward_hook(
                    lambda _module, _inputs, output, module=module: tell_when_reached(
                        output, owner, number, module
                    )
                )

    def create_grouped_sharding_infos(
        self, module: nn.Module, *rest: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """TorchRec's, with our settings and rates among the arguments of the kernels."""
        shown = _WithoutOptimizers(module, self._settings)
        found = super().create_grouped_sharding_infos(shown, *rest)
        for info in chain.from_iterable(found.values()):
            table = info.embedding_config
            if table.name in self._settings:
                info.fused_params["learning_rate"] = self._rates[table.name]
                info.fused_params[GROUP_KEY] = (self._settings[table.name], table.embedding_dim)
        return found

    def _create_lookups(self) -> None:
        if not self._settings:
            super()._create_lookups()
            return
        # As the `create_lookup` of TorchRec's shardings, each of which names its lookup's class.
        for kind, sharding in zip(self._sharding_types, self._shardings(), strict=True):
            lookup = self._create_lookup(
                kind,
                names=self._names,
                settings=self._settings,
                grouped_configs=sharding._grouped_embedding_configs_per_rank[self._env.rank],
                pg=self._env.process_group,
                device=self._device,
                env=self._env,
            )
            if kind == ShardingType.DATA_PARALLEL.value:
                lookup.hide_from_ddp()
            if getattr(self, "enable_embedding_update", False) and sharding.enable_embedding_update:
                self._updates.append(sharding.create_update(lookup))
            self._lookups.append(lookup)

    def init_data_parallel(self) -> None:
        """TorchRec's: put lookups into DDP, which refuses those with nothing to reduce."""
        kind = ShardingType.DATA_PARALLEL.value
        lookups = dict(zip(self._sharding_types, self._unwrapped_lookups(), strict=True))
        if not (self._settings and kind in lookups and lookups[kind].reduces_all()):
            super().init_data_parallel()

    def _create_input_dist(self, *arguments: Any, **named: Any) -> None:
        super()._create_input_dist(*arguments, **named)
        if self._env.world_size == 1 or (self._device and self._device.type == "cuda"):
            return
        configs = sorted(self._configs(), key=lambda config: -config.num_embeddings)
        # Of the tables of one feature, the smallest.
        uses = {f: Use(f, c.name, c.num_embeddings) for c in configs for f in c.feature_names}
        for sharding, input_dist in zip(self._shardings(), self._input_dists, strict=True):
            if isinstance(input_dist, RwSparseFeaturesDist | TwRwSparseFeaturesDist):
                of_sharding = [uses[name] for name in sharding.feature_names()]
                plans = [self.module_sharding_plan[use.table] for use in of_sharding]
                # FATAL is 0.
                modes = [
                    self._bounds_check if plan.bounds_check_mode is None else plan.bounds_check_mode
                    for plan in plans
                ]
                input_dist.register_forward_pre_hook(CheckBeforeSending(of_sharding, modes))

    def reset_parameters(self) -> None:
        """Give all tables their initial values; TorchRec calls it when everything is built."""
        super().reset_parameters()
        init = self._table_init
        of_default = {config.name for config in self._configs() if _is_default_init(config)}
        for kernel in self._kernels():
            if init is None and not isinstance(kernel, CowClipKernel):
                continue
            tables = kernel.config.embedding_tables
            shards = shards_of(kernel.config, self._names)
            weights = kernel.emb_module.split_embedding_weights()
            for table, shard, part in zip(tables, shards, weights, strict=True):
                if init is None and table.name not in of_default:
                    continue
                fill_shard_(
                    part,
                    (init.get(table.name) if isinstance(init, Mapping) else init) or TableInit(),
                    table=table.name,
                    row_offset=shard.row_offset,
                    column_offset=shard.column_offset,
                    dim=table.embedding_dim,
                    low=table.get_weight_init_min(),
                    high=table.get_weight_init_max(),
                )

    def input_dist(
        self, ctx: Any, features: KeyedJaggedTensor, *rest: Any
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send ids, a `TensorDict`'s too, to the ranks that own their rows."""
        if not (self._settings and isinstance(features, KeyedJaggedTensor)):
            return super().input_dist(ctx, features, *rest)
        weights = features.weights_or_none()
        if weights is not None:
            check_weights(
                (config for config in self._configs() if config.name in self._settings),
                self.module_sharding_plan,
            )
        if weights is not None and weights.requires_grad:
            order = [name for sharding in self._shardings() for name in sharding.feature_names()]
            plans = {plan.sharding_type for plan in self.module_sharding_plan.values()}
            if not (keeps_gradient_of_weights(plans, self._env) and features.keys() == order):
                raise ValueError(
                    "tables with CowClip: TorchRec gives per-sample weights a gradient only if "
                    "it does not send or reorder them: plan all tables of the collection as "
                    "data_parallel (or, on one process, table_wise) and give the features in the "
                    f"order {', '.join(order):.200}. Or detach() the weights, or learn them in a "
                    "FeatureProcessedEmbeddingBagCollection"
                )
        if features.variable_stride_per_key():
            features = self._with_one_batch_size(features)
        return super().input_dist(ctx, features, *rest)

    def update_shards(self, *_: Any, **__: Any) -> None:
        """Refused: TorchRec would rebuild the lookups without the settings."""
        raise ValueError(
            "tables with CowClip cannot be resharded in place; save a checkpoint and shard a "
            "new model with the other plan"
        )

    def cowclip_tables(self) -> list[CowClipTables]:
        """The tables of this rank that an optimizer with CowClip updates."""
        tables = [kernel.emb_module for kernel in self._kernels()]
        return [tbe for tbe in tables if isinstance(tbe, CowClipTables)]

    def groups(self) -> Iterator[GroupedEmbeddingConfig]:
        """The tables of all ranks, grouped by lookup."""
        for sharding in self._shardings():
            yield from chain.from_iterable(sharding._grouped_embedding_configs_per_rank)

    def register_post_lookup_tracker_fn(self, record_fn: Callable[..., None]) -> None:
        """Let a tracker record lookups; refused where rows change that were not looked up."""
        check_tracking(record_fn, self._settings)
        super().register_post_lookup_tracker_fn(record_fn)

    def _flush(self) -> None:
        # On every rank, whether it has tables or not.
        self.owner.check_queued(up_to_now=True)
        for tbe in self.cowclip_tables():
            tbe.flush()

    def _unwrapped_lookups(self) -> Iterator[Any]:
        for lookup in self._lookups:
            yield getattr(lookup, "module", lookup)

    def _kernels(self) -> Iterator[_Fused]:
        for lookup in self._unwrapped_lookups():
            for kernel in getattr(lookup, "_emb_modules", []):
                if isinstance(kernel, _Fused):
                    yield kernel


class CowClipShardedEmbeddingBagCollection(CowClipCollection, ShardedEmbeddingBagCollection):
    """A sharded `EmbeddingBagCollection`."""

    def _create_lookup(self, sharding_type: str, **arguments: Any) -> nn.Module:
        is_grid = sharding_type == ShardingType.GRID_SHARD.value
        return CowClipPooledLookup(
            sharding_type=ShardingType.TABLE_ROW_WISE if is_grid else ShardingType(sharding_type),
            scale_weight_gradients=sharding_type != ShardingType.DATA_PARALLEL.value,
            **arguments,
        )

    def _with_one_batch_size(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return repeat_bags(features)

    def _shardings(self) -> list[Any]:
        return self._embedding_shardings

    def _configs(self) -> Sequence[BaseEmbeddingConfig]:
        return self._embedding_bag_configs


class CowClipShardedEmbeddingCollection(CowClipCollection, ShardedEmbeddingCollection):
    """A sharded `EmbeddingCollection`."""

    def _create_lookup(self, _sharding_type: str, **arguments: Any) -> nn.Module:
        return CowClipSequenceLookup(**arguments)

    def _with_one_batch_size(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        raise ValueError(
            "tables with CowClip: a variable batch size per feature is not supported in an "
            "EmbeddingCollection; give every feature the same batch size"
        )

    def _shardings(self) -> list[Any]:
        return list(self._sharding_type_to_sharding.values())

    def _configs(self) -> Sequence[BaseEmbeddingConfig]:
        return self._embedding_configs


@torch.compiler.disable(reason=NOT_COMPILED)
def tell_when_reached(
    output: Tensor, owner: BackwardUpdate, number: int, module: int = 0
) -> Tensor:
    """Call `owner.reach` when backward goes through a lookup's output."""
    if not (output.requires_grad and torch.is_grad_enabled()):
        return output
    # A rank without tables may return a leaf, which has no backward to hook.
    output = output.view_as(output) if output.grad_fn is None else output
    assert output.grad_fn is not None
    output.grad_fn.register_prehook(lambda _: owner.reach(number, module))
    return output


def local_lookup(
    module: nn.Module, fields: Sequence[str]
) -> Callable[[KeyedJaggedTensor], Tensor] | None:
    """The lookup of a collection whose ids stay here, without TorchRec's steps around it.

    On a CPU these take as long as a small batch's products.

    Args:
        fields: the keys of the batches, in the order of the output's columns.

    Returns:
        A function from a batch to its pooled rows `[batch, columns]`; None if another rank or
        kernel has a table, or if ids have weights or another order.
    """
    if not isinstance(module, CowClipShardedEmbeddingBagCollection):
        return None
    kernels = list(module._kernels())
    if module._env.world_size > 1 or module._device.type != "cpu" or len(kernels) != 1:
        return None
    (kernel,) = kernels
    tables, config = kernel.emb_module, kernel.config
    orders = config.feature_names(), module._embedding_names
    is_in_order = all(list(order) == list(fields) for order in orders)
    if config.is_weighted or not (is_in_order and isinstance(kernel, CowClipKernel)):
        return None

    def look_up(features: KeyedJaggedTensor) -> Tensor:
        rows = tables(features.values().long(), features.offsets().long())
        return tell_when_reached(rows, module.owner, module.number)

    return look_up


def local_cowclip_tables(model: nn.Module) -> list[CowClipTables]:
    """All `CowClipTables` of this rank in a model, in the order of its modules."""
    return [tables for found in _collections_of(model) for tables in found.cowclip_tables()]


def table_update(model: nn.Module) -> BackwardUpdate | None:
    """The update of a model's tables, on every rank; None if no table has CowClip."""
    return next((found.owner for found in _collections_of(model)), None)


def _collections_of(model: nn.Module) -> Iterator[CowClipCollection]:
    return (module for module in model.modules() if isinstance(module, CowClipCollection))


def _is_default_init(config: BaseEmbeddingConfig) -> bool:
    """Whether TorchRec set `init_fn` itself: uniform within the range of the config."""
    function: Any = config.init_fn
    bounds = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    return getattr(function, "func", None) is nn.init.uniform_ and function.keywords == bounds
