# pyright: basic
"""TorchRec sharders under which tables with CowClip are updated in their backward."""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.distributed.optim import apply_optimizer_in_backward as in_backward
from torchrec import optim as torchrec_optim
from torchrec.distributed.embedding import EmbeddingCollectionSharder, get_ec_index_dedup
from torchrec.distributed.embedding_types import (
    BaseEmbeddingSharder,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from stampede.optim.optimizers import CowClipOptimizer
from stampede.optim.rules import Rule
from stampede.optim.sharded.backward_update import BackwardUpdate
from stampede.optim.sharded.collections import (
    CowClipCollection,
    CowClipShardedEmbeddingBagCollection,
    CowClipShardedEmbeddingCollection,
)
from stampede.optim.sharded.supported import (
    SHARDING_TYPES,
    check_collection,
    check_environment,
    check_table,
    compute_kernel,
)
from stampede.optim.table_init import TableInit
from stampede.optim.update_settings import Kernels, UpdateSettings

_LOG = logging.getLogger("stampede.optim")

_Module = TypeVar("_Module", bound=nn.Module)

# Keys of `fused_params` (FBGEMM's arguments) that concern the lookup only.
_LOOKUP_ARGUMENTS = frozenset(
    {
        "bounds_check_mode",
        "cache_algorithm",
        "cache_load_factor",
        "cache_precision",
        "cache_reserved_memory",
        "embedding_table_index_type",
        "embedding_table_offset_type",
        "enforce_hbm",
        "output_dtype",
        "prefetch_pipeline",
    }
)


def cowclip_sharders(
    init: TableInit | Mapping[str, TableInit] | None = None,
    fused_params: dict[str, Any] | None = None,
    *,
    backwards_per_step: int | None = 1,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    kernels: Kernels = "auto",
) -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, with ours for pooled and sequence embeddings.

    For `DistributedModelParallel` and the planner. Tables with a CowClip optimizer
    (`apply_optimizer_in_backward`) are updated in their backward, under every sharding type
    including data-parallel, and inside managed collision and feature processors. Other tables keep
    TorchRec's own optimizer. The log names each table's optimizer. The result does not depend on
    the plan or the number of ranks.

    Args:
        init: distribution of the tables' initial values, which depend only on (seed, table, row,
            column); of all tables, or by their names. None: tables with CowClip are uniform in
            TorchRec's default range, or follow their own `init_fn`, whose values depend on the
            plan.
        fused_params: of the lookups, passed on to TorchRec's sharders. With CowClip, settings of
            the update are refused here: give them to `apply_optimizer_in_backward`.
        backwards_per_step: for gradient accumulation, how many backward passes make one step of the
            tables. Their gradients and counts add up. If the model's dense optimizer or its
            `fused_optimizer` steps earlier, fewer passes make the step; more are refused. The dense
            optimizer does so from its second step on; end a short first step by
            `model.fused_optimizer.step()`. None: each pass is a step.
        qcomm_codecs_registry: from TorchRec's `get_qcomm_codecs_registry`: embeddings and their
            gradients are sent in lower precision. Ids are not, so counts stay exact.
        kernels: what updates tables with CowClip on a GPU. `auto`: Triton's kernels, if on this GPU
            they compute what plain PyTorch does. That is tried before the first step, within
            seconds, and the log says so if plain PyTorch takes their place. `torch` or `triton`:
            without trying. No effect on a CPU.

    Example::

        apply_optimizer_in_backward(
            CowClipAdam, model.ebc.parameters(), {"lr": 1e-4, "l2": 1e-5, "clip": CowClip()}
        )
        model = DistributedModelParallel(model, device=device, sharders=cowclip_sharders())
    """
    owner = BackwardUpdate(backwards_per_step, kernels)
    of_torchrec = {"fused_params": fused_params, "qcomm_codecs_registry": qcomm_codecs_registry}
    bags = CowClipEmbeddingBagCollectionSharder(init, owner, **of_torchrec)
    sequences = CowClipEmbeddingCollectionSharder(init, owner, **of_torchrec)
    ours = [
        bags,
        sequences,
        _FeatureProcessedSharder(bags),
        _ManagedCollisionBagSharder(bags),
        _ManagedCollisionSharder(sequences),
        _SingleBagSharder(fused_params),
    ]
    kinds = {sharder.module_type for sharder in ours}
    return ours + [other for other in get_default_sharders() if other.module_type not in kinds]


class _SingleBagSharder(EmbeddingBagSharder):
    """Refuses our optimizers on a single `nn.EmbeddingBag`, where TorchRec drops them silently."""

    def shard(self, module: nn.EmbeddingBag, *rest: Any, **named: Any) -> nn.Module:
        """Shard a bag, unless its optimizer has CowClip."""
        chosen = optimizer_of(module.weight)
        if chosen is not None:
            raise ValueError(
                f"a single nn.EmbeddingBag has the optimizer {chosen.name}, which TorchRec would "
                "drop; make it a table of an EmbeddingBagCollection"
            )
        return super().shard(module, *rest, **named)


class _InDeviceMemory(BaseEmbeddingSharder[_Module]):
    """Plans tables in the device's memory."""

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The one kernel of a sharding type."""
        return [compute_kernel(sharding_type)]


class _CowClipSharder(_InDeviceMemory[_Module]):
    """Common parts of the sharders of pooled and sequence embeddings."""

    _sharded_type: type[CowClipCollection]
    # Path of the module around the collection, for calls of `shard` without one.
    module_fqn: str | None = None

    def __init__(
        self,
        init: TableInit | Mapping[str, TableInit] | None,
        owner: BackwardUpdate,
        **of_torchrec: Any,
    ) -> None:
        super().__init__(**of_torchrec)
        self._init = init
        self._owner = owner

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All sharding types, on every device (TorchRec offers no row-wise on CPU)."""
        return list(SHARDING_TYPES)

    def shardable_parameters(self, module: _Module) -> dict[str, nn.Parameter]:
        """The tables as the planner should see them: with an optimizer whose state it knows."""
        seen = {}
        for name, parameter in super().shardable_parameters(module).items():
            chosen = optimizer_of(parameter)
            if chosen is not None:
                shown = nn.Parameter(parameter.detach(), parameter.requires_grad)
                shown.__dict__.update(parameter.__dict__)
                shown.__dict__["_optimizer_classes"] = [with_equal_state(chosen.settings.rule)]
                parameter = shown
            seen[name] = parameter
        return seen

    def shard(
        self,
        module: _Module,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Shard the collection; a ValueError refuses what is not supported with CowClip."""
        parameters = super().shardable_parameters(module)
        chosen = {
            name: found
            for name, parameter in parameters.items()
            if (found := optimizer_of(parameter)) is not None
        }
        if chosen:
            self._check(module, params, env, {name: parameters[name] for name in chosen})
        sharded = self._sharded_type(
            settings={name: choice.settings for name, choice in chosen.items()},
            rates={name: choice.lr for name, choice in chosen.items()},
            init=self._init,
            owner=self._owner,
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            device=device,
            module_fqn=module_fqn or self.module_fqn,
        )
        for name in chosen:
            parameters[name].__dict__["_stampede_module"] = weakref.ref(sharded)
            _forget_hooks(parameters[name])
        if env.rank == 0:
            say_optimizers(sharded.groups(), parameters, chosen, self.fused_params or {})
        return sharded

    def _check(
        self,
        module: nn.Module,
        plan: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        chosen: dict[str, nn.Parameter],
    ) -> None:
        """Refuse what is not supported with CowClip; `chosen` are the tables that have it."""
        is_sequence = isinstance(module, EmbeddingCollection)
        tables: Any = module.embedding_configs if is_sequence else module.embedding_bag_configs
        configs = {config.name: config for config in tables()}
        is_weighted = getattr(module, "is_weighted", bool)()
        check_environment(env)
        for name, parameter in chosen.items():
            check_table(configs[name], plan[name], is_weighted, self.qcomm_codecs_registry)
            if not parameter.requires_grad:
                raise ValueError(
                    f"table {name!r} with CowClip has requires_grad=False, which sharded tables do "
                    "not heed; to freeze it, name FrozenTables in apply_optimizer_in_backward"
                )
            # Each of two modules would get its own copy.
            if getattr(parameter, "_stampede_module", lambda: None)() is not None:
                raise ValueError(
                    f"table {name!r} with CowClip is used by two modules, which would be sharded "
                    "into two separate tables; give both features to one collection (feature_names "
                    "of one table)"
                )
        check_collection(configs, plan)
        others = sorted(set(self.fused_params or ()) - _LOOKUP_ARGUMENTS)
        if others:
            raise ValueError(
                f"fused_params of cowclip_sharders() has {', '.join(others)}, which tables with "
                "CowClip ignore; leave it out, and set lr, weight_decay etc. in "
                f"apply_optimizer_in_backward (allowed: {', '.join(sorted(_LOOKUP_ARGUMENTS))})"
            )
        if is_sequence and get_ec_index_dedup():
            raise ValueError(
                "tables with CowClip: index de-duplication (set_ec_index_dedup) removes repeated "
                "ids before the lookup and so falsifies their counts; call "
                "set_ec_index_dedup(False)"
            )

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        """The class that `shard` returns."""
        return self._sharded_type


class CowClipEmbeddingBagCollectionSharder(
    _CowClipSharder[EmbeddingBagCollection], EmbeddingBagCollectionSharder
):
    """Shards `EmbeddingBagCollection`; see `cowclip_sharders`."""

    _sharded_type = CowClipShardedEmbeddingBagCollection


class CowClipEmbeddingCollectionSharder(
    _CowClipSharder[EmbeddingCollection], EmbeddingCollectionSharder
):
    """Shards `EmbeddingCollection`; see `cowclip_sharders`."""

    _sharded_type = CowClipShardedEmbeddingCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The types that TorchRec has for sequences."""
        return EmbeddingCollectionSharder.sharding_types(self, compute_device_type)


class _FeatureProcessedSharder(
    _InDeviceMemory[FeatureProcessedEmbeddingBagCollection],
    FeatureProcessedEmbeddingBagCollectionSharder,
):
    """TorchRec's sharder, with ours for the tables inside."""


class _ManagedCollision(_InDeviceMemory[_Module]):
    """Common parts of both sharders of managed collision."""

    _e_sharder: _CowClipSharder

    def shard(
        self,
        module: _Module,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Shard the tables and their map of ids to rows."""
        # TorchRec does not pass on the path, and tables of two modules may share a name.
        named = copy.copy(self)
        named._e_sharder = copy.copy(self._e_sharder)
        named._e_sharder.module_fqn = module_fqn
        return super(_ManagedCollision, named).shard(module, params, env, device, module_fqn)


class _ManagedCollisionBagSharder(
    _ManagedCollision[ManagedCollisionEmbeddingBagCollection],
    ManagedCollisionEmbeddingBagCollectionSharder,
):
    """TorchRec's sharder, with ours for the tables inside."""


class _ManagedCollisionSharder(
    _ManagedCollision[ManagedCollisionEmbeddingCollection],
    ManagedCollisionEmbeddingCollectionSharder,
):
    """TorchRec's sharder, with ours for the tables inside."""


class ChosenOptimizer(NamedTuple):
    """The optimizer that a user named for a table."""

    name: str
    settings: UpdateSettings
    lr: float

    def __str__(self) -> str:
        settings = self.settings
        return (
            f"{self.name} (lr {self.lr:g}, l2 {settings.l2:g}, clip {settings.clip.name}, "
            f"rows {settings.rows})"
        )


def _forget_hooks(parameter: nn.Parameter) -> None:
    """Let torch free a table that a sharded one replaces, and its optimizer.

    torch would keep both until the process ends: in its weak map from tables to the nodes of their
    gradients, the node holds its table.
    """
    for handle in in_backward.param_to_optim_hook_handle_map.pop(parameter, []):
        handle.remove()
    in_backward.param_to_acc_grad_map.pop(parameter, None)


def optimizer_of(parameter: Tensor) -> ChosenOptimizer | None:
    """The optimizer of ours that `apply_optimizer_in_backward` gave a table, if it did."""
    classes = getattr(parameter, "_optimizer_classes", [])
    if not any(issubclass(kind, CowClipOptimizer) for kind in classes):
        return None
    if len(classes) > 1:
        names = ", ".join(kind.__name__ for kind in classes)
        raise ValueError(
            f"a table was given several optimizers ({names}); call apply_optimizer_in_backward "
            "once for each table"
        )
    (kind,), (arguments,) = classes, getattr(parameter, "_optimizer_kwargs", [])
    group = kind.defaults_with(arguments)
    if group["padding_idx"] is not None:
        raise ValueError(
            f"{kind.__name__}: padding_idx is {group['padding_idx']!r}, but TorchRec's tables have "
            "no padding row; leave padding_idx out, and leave padding ids out of the bags"
        )
    return ChosenOptimizer(kind.__name__, kind.update_settings(group), float(group["lr"]))


def say_optimizers(
    groups: Iterable[GroupedEmbeddingConfig],
    parameters: dict[str, nn.Parameter],
    chosen: dict[str, ChosenOptimizer],
    fused_params: dict[str, Any],
) -> None:
    """Log which optimizer each table of a collection has; warn about unchosen defaults."""
    found: dict[tuple[int, str], set[str]] = defaultdict(set)
    defaults = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    for group in groups:
        is_dense = group.compute_kernel == EmbeddingComputeKernel.DENSE
        for name in (table.name for table in group.embedding_tables):
            given = [kind.__name__ for kind in getattr(parameters[name], "_optimizer_classes", ())]
            level = logging.INFO
            if name in chosen and chosen[name].settings.rule.is_frozen:
                text = f"are frozen by {chosen[name].name}"
            elif name in chosen:
                text = f"are updated in their backward by {chosen[name]}"
                if is_dense:
                    text += ", also under data_parallel: no optimizer of the program may have them"
            elif is_dense:
                text = "are left to the program's own optimizer, as TorchRec does for data_parallel"
                if given:
                    level = logging.WARNING
                    text += f"; the {given[0]} of apply_optimizer_in_backward does not update them"
            else:
                fused = group.fused_params or {}
                default = defaults["optimizer"].default.name
                kind = given[0] if given else getattr(fused.get("optimizer"), "name", default)
                lr = fused.get("learning_rate", defaults["learning_rate"].default)
                text = f"are updated in their backward by TorchRec's {kind} (lr {lr:g})"
                if not given and not {"optimizer", "learning_rate"} & set(fused_params):
                    level = logging.WARNING
                    text += ", a default: none was given; name one in apply_optimizer_in_backward"
            found[level, text].add(name)
    for (level, text), names in sorted(found.items()):
        _LOG.log(level, "tables %s %s", ", ".join(sorted(names)), text)


# Optimizers that the planner knows, by states shaped like the table and with one value a row.
_BY_STATES = {
    (0, 0): torch.optim.SGD,
    (1, 0): torch.optim.Adagrad,
    (0, 1): torchrec_optim.RowWiseAdagrad,
    (1, 1): torchrec_optim.PartialRowWiseAdam,
}


def with_equal_state(rule: Rule) -> type[torch.optim.Optimizer]:
    """An optimizer from the planner's list with as much state as a rule."""
    return _BY_STATES.get((len(rule.element_states), len(rule.row_states)), torch.optim.Adam)
