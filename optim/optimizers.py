# pyright: basic
"""The optimizers with CowClip: for plain PyTorch, and as the settings of TorchRec's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from stampede.optim.backends import choose_backend
from stampede.optim.backends.torch import TorchBackend
from stampede.optim.clip import CowClip
from stampede.optim.row_gradients import (
    TableOptimizer,
    padding_of,
    refuse_unknown,
    row_gradients,
)
from stampede.optim.rules import (
    SGD,
    Adagrad,
    Adam,
    NoStep,
    RowWiseAdagrad,
    RowWiseAdam,
    Rule,
    as_setting,
    check_number,
)
from stampede.optim.table_array import PendingUpdate, TableArray, TableShard
from stampede.optim.update import update_
from stampede.optim.update_settings import UpdateSettings

_Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]]

_COMMON = tuple(field.name for field in fields(UpdateSettings) if field.name != "rule")
_OF_RULE: dict[type[Rule], type[CowClipOptimizer]] = {}


class CowClipOptimizer(TableOptimizer):
    """Base of the optimizers with CowClip for embedding tables.

    In TorchRec, name one in `apply_optimizer_in_backward` and pass `cowclip_sharders()` to
    `DistributedModelParallel`: the update then runs inside the sharded tables' backward.

    In plain PyTorch it is an ordinary optimizer for `nn.Embedding(sparse=True)` and
    `nn.EmbeddingBag(sparse=True)`, whose uncoalesced gradient has one entry per occurrence of an id
    and so carries the counts. Rows of a module's `padding_idx` are never changed. As with torch's
    optimizers, a table without a gradient is left alone, and no step is counted for it.

    Create the optimizer before the first lookup: it notes lookups from then on. If a table is not
    the `weight` of an `nn.Embedding` or `nn.EmbeddingBag` (`functional.embedding`,
    parametrizations), or a subclass changes its lookup, the counts of several lookups in one
    backward pass are too low, because torch merges their gradients: then give the counts, and
    `padding_idx`.

    A subclass names a rule; its settings are the fields of the rule and of `UpdateSettings`.

    Args:
        params: tables, `[rows, dim]`, contiguous, or param groups.
        lr: learning rate; None for the default of the class.
        settings: those of the rule, and:
            clip: the clipping rule; None for no clip.
            l2: coefficient of `||w||^2` in the loss: adds `2*l2*w` to the gradient, inside the
                clip.
            weight_decay: decoupled decay, `w = w * (1 - lr*weight_decay)`, outside the clip
                (AdamW).
            rows: `all`, every row takes a step each time (the authors' code), or `touched`, only
                the rows of the batch (TorchRec's and SparseAdam's convention).
            on_nonfinite: what to do about a NaN or an infinity in a row's gradient: `error` refuses
                the step, `skip_row` leaves the row out of the batch.
            padding_idx: plain PyTorch: a row that is never changed; found automatically if the
                table belongs to an `nn.Embedding` or `nn.EmbeddingBag`.
            seed: of the stochastic rounding of fp16 and bf16 tables.

    Raises:
        TypeError: an argument is unknown.
        ValueError: a setting is out of range, or a table is not supported.

    Attributes:
        rule_type: the rule.
        default_lr: the learning rate if none is given.
    """

    rule_type: ClassVar[type[Rule]]
    default_lr: ClassVar[float] = 1e-2

    def __init_subclass__(cls) -> None:
        """Show the settings as the arguments of the constructor, in help and messages."""
        super().__init_subclass__()
        _OF_RULE.setdefault(cls.rule_type, cls)
        lr, *others = (
            Parameter(name, Parameter.KEYWORD_ONLY, default=value)
            for name, value in cls.defaults_with({}).items()
        )
        params = Parameter("params", Parameter.POSITIONAL_OR_KEYWORD)
        lr = lr.replace(kind=Parameter.POSITIONAL_OR_KEYWORD)
        cls.__signature__ = Signature([params, lr, *others])

    def __init__(self, params: _Params, lr: float | None = None, **settings: Any) -> None:
        self._backends: dict[Tensor, TorchBackend] = {}
        if lr is not None:
            settings["lr"] = lr
        defaults = self.defaults_with(settings)
        groups: Any = params
        if not isinstance(params, Tensor):
            groups = list(params)
            if not groups:
                raise ValueError(
                    f"{type(self).__name__} got no parameters. TorchRec's tables with an "
                    "optimizer of apply_optimizer_in_backward are updated in their backward, "
                    "data_parallel ones too, so leave this optimizer out for them"
                )
        super().__init__(groups, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by load_state_dict, with groups that may be of an earlier version."""
        super().__setstate__(state)
        self._backends = {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its settings as the constructor does."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        row = added["padding_idx"]
        try:
            clip = self.update_settings(added).clip
            # `torch.load` must read a state_dict, whose groups hold it, with its default settings.
            torch.serialization.add_safe_globals([type(clip)])
            for param in added["params"]:
                table = f"{type(self).__name__}: a parameter of shape {tuple(param.shape)}"
                if param.ndim != 2:
                    raise ValueError(
                        f"{table} is not a table [rows, dim]; give other parameters to another "
                        "optimizer"
                    )
                if row is not None and not -len(param) <= row < len(param):
                    raise ValueError(f"{table} has no row {row!r}; write another padding_idx")
        except ValueError:
            self.param_groups.pop()
            raise

    @classmethod
    def update_settings(cls, group: Mapping[str, Any]) -> UpdateSettings:
        """The settings of a param group, checked together with its learning rate."""
        try:
            check_number("lr", group["lr"])
            # A loaded list could not be hashed.
            own = {field.name: as_setting(group[field.name]) for field in fields(cls.rule_type)}
            common = {name: group[name] for name in _COMMON}
            if common["clip"] is None:
                common["clip"] = CowClip(granularity="none")
            return UpdateSettings(rule=cls.rule_type(**own), **common)
        except ValueError as wrong:
            raise ValueError(f"{cls.__name__}: {wrong}") from None

    @classmethod
    def defaults_with(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of the optimizer made with these keyword arguments, `lr` included."""
        rule, common = cls.rule_type(), UpdateSettings()
        defaults = {"lr": cls.default_lr}
        defaults |= {field.name: getattr(rule, field.name) for field in fields(rule)}
        defaults |= {name: getattr(common, name) for name in _COMMON} | {"padding_idx": None}
        refuse_unknown(cls, {name: None for name in arguments if name not in defaults})
        return defaults | dict(arguments)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Tensor] | None = None,
        *,
        counts: Mapping[Tensor, Tensor] | None = None,
    ) -> Tensor | None:
        """Update every table that has a gradient.

        Args:
            closure: computes the loss, which is returned, and the gradients.
            counts: by parameter, `[rows]` integers: how often each row occurred since the last
                step. For gradients that do not tell it: dense ones, and coalesced ones.

        Raises:
            ValueError: a gradient does not tell how often each id occurred.
            NonFiniteGradientError: a gradient is not finite, under `on_nonfinite="error"`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = self._read_gradients(counts or {})
        if updates:
            update_([update for _, update in updates])
        for param, _ in updates:
            self.state[param]["step"] += 1
        return loss

    def _read_gradients(
        self, counts: Mapping[Tensor, Tensor]
    ) -> list[tuple[Tensor, PendingUpdate]]:
        """The updates to do; all checks are made here, so that a refusal changes no table."""
        batches = []
        for group in self.param_groups:
            settings = self.update_settings(group)
            for param in group["params"]:
                if param.grad is not None:
                    batch = row_gradients(param, settings, counts.get(param))
                    batches.append((param, group, settings, batch))
        # Each table needs its own name: sums and random numbers depend on it.
        names = {param: str(position) for position, param in enumerate(self._params())}
        updates = []
        for param, group, settings, batch in batches:
            state, shards = self.state[param], (TableShard(names[param], len(param)),)
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
            try:
                array = TableArray.create(
                    shards, param.detach(), settings, param.shape[1], known=state
                )
            except ValueError as wrong:
                raise ValueError(f"{type(self).__name__}: {wrong}") from None
            state.update(array.states)
            padding = group["padding_idx"]
            array.frozen_row = padding_of(param) if padding is None else padding % len(param)
            known = self._backends.get(param)
            if known is None or not known.array.is_same(array):
                # Anyone may read the table, so none of its rows may wait.
                self._backends[param] = choose_backend(array)
            step = int(state["step"]) + 1
            update = PendingUpdate(self._backends[param], batch, float(group["lr"]), step)
            updates.append((param, update))
        return updates


class CowClipAdam(CowClipOptimizer):
    """Adam with CowClip for embedding tables; see `CowClipOptimizer` for where it can be used.

    Args:
        params, lr, clip, l2, weight_decay, rows, on_nonfinite, padding_idx, seed: see
            `CowClipOptimizer`; `clip=None` is plain Adam.
        betas, eps, eps_placement: see `Adam`.

    Example::

        table = torch.nn.Embedding(1000, 16, sparse=True)
        optimizer = CowClipAdam(table.parameters(), lr=1e-4, l2=1e-5, clip=CowClip())
        table(ids).sum().backward()
        optimizer.step()
    """

    rule_type = Adam
    default_lr = 1e-4


class CowClipRowWiseAdam(CowClipAdam):
    """`CowClipAdam` with one second moment per row, which saves a third of its memory.

    The moment follows the mean of the squared gradient over the row (FBGEMM's
    PARTIAL_ROWWISE_ADAM).
    """

    rule_type = RowWiseAdam


class CowClipAdagrad(CowClipOptimizer):
    """Adagrad with CowClip: `s = s + g*g; w = w - lr * g / (sqrt(s) + eps)`.

    Args:
        params, lr, clip, l2, weight_decay, rows, on_nonfinite, padding_idx, seed: see
            `CowClipOptimizer`.
        eps: see `Adagrad`.
    """

    rule_type = Adagrad


class CowClipRowWiseAdagrad(CowClipAdagrad):
    """`CowClipAdagrad` with one sum per row, of the mean of its squared gradient.

    The state is one number per row (FBGEMM's EXACT_ROWWISE_ADAGRAD).
    """

    rule_type = RowWiseAdagrad


class CowClipSGD(CowClipOptimizer):
    """SGD with CowClip: `b = momentum*b + g; w = w - lr*b`; no state without momentum.

    Args:
        params, lr, clip, l2, weight_decay, rows, on_nonfinite, padding_idx, seed: see
            `CowClipOptimizer`.
        momentum: see `SGD`.
    """

    rule_type = SGD


class FrozenTables(CowClipOptimizer):
    """Leaves tables as they are: no step, no L2, no memory for moments.

    In TorchRec, their lookups then have a backward that keeps nothing.

    Args:
        params: see `CowClipOptimizer`.
        lr, clip, l2, weight_decay, rows, on_nonfinite, padding_idx, seed: without effect.
    """

    rule_type = NoStep


def optimizer_with(rule: type[Rule]) -> type[CowClipOptimizer]:
    """The optimizer with a rule; of a rule that has none, it is made."""
    if rule not in _OF_RULE:
        type(f"CowClip{rule.__name__}", (CowClipOptimizer,), {"rule_type": rule})
    return _OF_RULE[rule]
