"""TorchRec sharders under which tables with CowClip are updated in their backward."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, get_ec_index_dedup
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from stampede.optim.sharded.backward_update import BackwardUpdate
from stampede.optim.sharded.chosen_optimizer import (
    as_fbgemm_sgd,
    optimizer_of,
    say_optimizers,
    with_equal_state,
)
from stampede.optim.sharded.collections import (
    CowClipCollection,
    CowClipShardedEmbeddingBagCollection,
    CowClipShardedEmbeddingCollection,
)
from stampede.optim.sharded.passes import Passes
from stampede.optim.sharded.supported import (
    SHARDING_TYPES,
    check_collection,
    check_environment,
    check_table,
    compute_kernel,
)
from stampede.optim.table_init import TableInit

# What of `fused_params`, FBGEMM's arguments, does not reach the update of a table.
_OF_THE_LOOKUP = frozenset(
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
    init: TableInit | None = None,
    fused_params: dict[str, Any] | None = None,
    *,
    backwards_per_step: int | None = 1,
) -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, with ours of pooled and sequence embeddings among them.

    For `DistributedModelParallel` and the planner. Tables whose parameters carry an optimizer with
    CowClip (`apply_optimizer_in_backward`) get its update in their backward, under every sharding
    type, data-parallel included, also inside managed collision and feature processors; other tables
    keep TorchRec's own optimizer. The log says which optimizer each table has. The result does not
    depend on the plan or the number of ranks.

    Args:
        init: distribution of the tables' initial values; they depend on (seed, table, row, column)
            only, not on the plan or the number of ranks. `None`: tables with CowClip are uniform in
            TorchRec's default range, or follow their own `init_fn`, which then depends on the plan.
        fused_params: of the lookups, passed on to TorchRec's sharders. With a table with CowClip,
            what would be about the update is refused: it goes to `apply_optimizer_in_backward`.
        backwards_per_step: how many backward passes make one step of the tables, for gradient
            accumulation: gradients and counts of so many add up, or of fewer if an optimizer of
            the program steps before. More between two steps of the program's optimizers are
            refused. None: each pass is a step of its own.

    Example::

        apply_optimizer_in_backward(
            CowClipAdam, model.ebc.parameters(), {"lr": 1e-4, "l2": 1e-5, "clip": CowClip()}
        )
        model = DistributedModelParallel(model, device=device, sharders=cowclip_sharders())
    """
    owner = BackwardUpdate(Passes(backwards_per_step))
    bags = CowClipEmbeddingBagCollectionSharder(init, owner, fused_params)
    sequences = CowClipEmbeddingCollectionSharder(init, owner, fused_params)
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
    """Of single `nn.EmbeddingBag`s, whose optimizer TorchRec drops without a word."""

    def shard(self, module: nn.EmbeddingBag, *rest: Any, **named: Any) -> nn.Module:
        """Shard a bag.

        Raises:
            ValueError: its optimizer has CowClip.
        """
        chosen = optimizer_of(module.weight)
        if chosen is not None:
            raise ValueError(
                f"a single nn.EmbeddingBag has the optimizer {chosen.name}, which TorchRec would "
                "drop; make it a table of an EmbeddingBagCollection"
            )
        return super().shard(module, *rest, **named)


class _InDeviceMemory(BaseEmbeddingSharder[nn.Module]):
    """Sharders of tables that lie in the device's memory."""

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The one kernel of a sharding type."""
        return [compute_kernel(sharding_type)]


class _CowClipSharder(_InDeviceMemory):
    """What the sharders of pooled and sequence embeddings have in common.

    Attributes:
        module_fqn: path of the module around the collection, where `shard` is not told it.
    """

    _sharded_type: type[CowClipCollection]
    module_fqn: str | None = None

    def __init__(
        self,
        init: TableInit | None,
        owner: BackwardUpdate,
        fused_params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(fused_params=fused_params)
        self._init = init
        self._owner = owner

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All of them, on every device (TorchRec offers no row-wise on CPU)."""
        return list(SHARDING_TYPES)

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The tables, as the planner is to see them: with an optimizer that it knows.

        The planner counts the state of a closed list of optimizers.
        """
        seen = {}
        for name, parameter in super().shardable_parameters(module).items():
            chosen = optimizer_of(parameter)
            if chosen is not None:
                shown = nn.Parameter(parameter.detach(), parameter.requires_grad)
                shown.__dict__.update(parameter.__dict__)
                shown._optimizer_classes = [with_equal_state(chosen.settings.rule)]
                parameter = shown
            seen[name] = parameter
        return seen

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Shard the collection.

        Raises:
            ValueError: a table's plan, width or dtype is not supported with CowClip, it belongs
                to another module too, one of its settings is out of range, or `fused_params`
                has some of another optimizer.
        """
        configs = {config.name: config for config in _configs(module)}
        parameters = super().shardable_parameters(module)
        chosen = {
            name: found
            for name, parameter in parameters.items()
            if (found := optimizer_of(parameter)) is not None
        }
        is_weighted = getattr(module, "is_weighted", bool)()
        for name, choice in chosen.items():
            check_environment(env)
            check_table(configs[name], params[name], choice.settings, is_weighted)
            _refuse_shared(name, parameters[name])
        if chosen:
            check_collection(configs, params)
            _refuse_of_the_update(self.fused_params)
            self._check_module(module)
        with as_fbgemm_sgd(parameters, chosen):
            sharded = self._sharded_type(
                settings={name: choice.settings for name, choice in chosen.items()},
                helen={n: choice.helen for n, choice in chosen.items() if choice.helen},
                init=self._init,
                owner=self._owner,
                module=module,
                table_name_to_parameter_sharding=params,
                env=env,
                fused_params=self.fused_params,
                device=device,
                module_fqn=module_fqn or self.module_fqn,
            )
        for name in chosen:
            parameters[name]._stampede_module = weakref.ref(sharded)
        if env.rank == 0:
            say_optimizers(sharded.groups(), parameters, chosen, self.fused_params or {})
        return sharded

    def _check_module(self, module: nn.Module) -> None:
        """Refuse what a kind of collection does not support."""

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        """What `shard` returns."""
        return self._sharded_type


class CowClipEmbeddingBagCollectionSharder(_CowClipSharder, EmbeddingBagCollectionSharder):
    """Shards `EmbeddingBagCollection`; see `cowclip_sharders`."""

    _sharded_type = CowClipShardedEmbeddingBagCollection


class CowClipEmbeddingCollectionSharder(_CowClipSharder, EmbeddingCollectionSharder):
    """Shards `EmbeddingCollection`; see `cowclip_sharders`."""

    _sharded_type = CowClipShardedEmbeddingCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Those that TorchRec has for sequences."""
        return EmbeddingCollectionSharder.sharding_types(self, compute_device_type)

    def _check_module(self, module: nn.Module) -> None:
        if get_ec_index_dedup():
            raise ValueError(
                "tables with CowClip: index de-duplication (set_ec_index_dedup) removes repeated "
                "ids before the lookup and so falsifies their counts; call "
                "set_ec_index_dedup(False)"
            )


class _FeatureProcessedSharder(_InDeviceMemory, FeatureProcessedEmbeddingBagCollectionSharder):
    """TorchRec's, with ours of the tables inside."""


class _ManagedCollision(_InDeviceMemory):
    """What both sharders of managed collision have in common."""

    _e_sharder: _CowClipSharder

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Shard the tables, and which id each of their rows is given.

        Raises:
            ValueError: a table has Helen; or see `_CowClipSharder.shard`.
        """
        for path, parameter in module._embedding_module.named_parameters():
            choice = optimizer_of(parameter)
            if choice is not None and choice.helen is not None:
                raise ValueError(
                    f"table {path.split('.')[-2]!r} with Helen: Helen looks up every batch twice, "
                    "and managed collision may give an id another row in between; write an "
                    "optimizer with CowClip"
                )
        # TorchRec does not say where the tables are: those of two modules may have one name.
        named = copy.copy(self)
        named._e_sharder = copy.copy(self._e_sharder)
        named._e_sharder.module_fqn = module_fqn
        return super(_ManagedCollision, named).shard(module, params, env, device, module_fqn)


class _ManagedCollisionBagSharder(_ManagedCollision, ManagedCollisionEmbeddingBagCollectionSharder):
    """TorchRec's, with ours of the tables inside."""


class _ManagedCollisionSharder(_ManagedCollision, ManagedCollisionEmbeddingCollectionSharder):
    """TorchRec's, with ours of the tables inside."""


def _refuse_of_the_update(fused_params: dict[str, Any] | None) -> None:
    """What FBGEMM's optimizer would be given is not read by the update of tables with CowClip."""
    others = sorted(set(fused_params or ()) - _OF_THE_LOOKUP)
    if others:
        raise ValueError(
            f"fused_params of cowclip_sharders() has {', '.join(others)}, which tables with "
            "CowClip would not follow; leave it out, and set lr, weight_decay etc. in "
            f"apply_optimizer_in_backward (allowed: {', '.join(sorted(_OF_THE_LOOKUP))})"
        )


def _configs(module: nn.Module) -> list[BaseEmbeddingConfig]:
    if isinstance(module, EmbeddingCollection):
        return module.embedding_configs()
    assert isinstance(module, EmbeddingBagCollection)
    return module.embedding_bag_configs()


def _refuse_shared(name: str, parameter: nn.Parameter) -> None:
    """Two modules would each get a table of their own where the user meant one."""
    other = getattr(parameter, "_stampede_module", lambda: None)()
    if other is not None:
        raise ValueError(
            f"table {name!r} with CowClip is used by two modules, which would be sharded into two "
            "separate tables; give both features to one collection (feature_names of one table)"
        )
