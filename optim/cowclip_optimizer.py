"""Optimizers with CowClip as `torch.optim.Optimizer`, and as the settings of a sharded table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from stampede.optim.backends import choose_backend
from stampede.optim.backends.torch import PendingUpdate, TorchBackend
from stampede.optim.clip import CowClip
from stampede.optim.embedding_modules import visit_modules
from stampede.optim.occurrences import follow
from stampede.optim.row_gradients import row_gradients
from stampede.optim.rules import Rule
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard, clipped_columns, state_dtype
from stampede.optim.update import update_

_COMMON = tuple(field.name for field in fields(UpdateSettings) if field.name != "rule")
# What torch's optimizers know under these names would be ignored here.
_NOT_SUPPORTED = ("maximize", "amsgrad", "nesterov", "dampening", "lr_decay")

# So that `torch.load` reads a state_dict, whose groups hold their clip, with its default settings.
torch.serialization.add_safe_globals([CowClip])


class CowClipOptimizer(torch.optim.Optimizer):
    """Base of the optimizers with CowClip for embedding tables.

    In TorchRec, name one in `apply_optimizer_in_backward` and pass `cowclip_sharders()` to
    `DistributedModelParallel`: the update then runs inside the sharded tables' backward. TorchRec's
    own sharders of collections say that they cannot cast it; that of a single `nn.EmbeddingBag`
    ignores every optimizer, so make that an `EmbeddingBagCollection`. In plain
    PyTorch it is an ordinary optimizer for `nn.Embedding(sparse=True)` and
    `nn.EmbeddingBag(sparse=True)`, whose uncoalesced gradient has one entry per occurrence of an
    id and so carries the counts; several lookups or backward passes before a step add up. Where
    the gradient has lost the counts, they can be given to `step`. Rows of a module's
    `padding_idx` are never changed. As with torch's optimizers, a table without a gradient
    (`grad` is None) is left alone altogether, and counts no step.

    Create the optimizer after the model and before the first lookup: the modules of the tables are
    found then, and note their lookups. Where a table is not the `weight` of an `nn.Embedding` or
    `nn.EmbeddingBag` (`functional.embedding`, parametrizations), or a subclass changes what it
    looked up, several lookups in one backward pass are counted too low, for torch merges their
    gradients: give the counts. The `padding_idx` of such a table must be given too.

    Args:
        params: tables, `[rows, dim]`, contiguous, or param groups.
        lr: learning rate.
        **settings: the fields of the class's rule and of `UpdateSettings`, by name, and
            `padding_idx`: a row that is never changed, where the table belongs to no module.

    Raises:
        ValueError: a setting is out of range, or a table or its module is not supported.
    """

    rule_type: ClassVar[type[Rule]]

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        settings: Mapping[str, Any],
    ) -> None:
        self._padding: dict[Tensor, int] | None = None
        self._backends: dict[Tensor, TorchBackend] = {}
        super().__init__(params, {"lr": lr, "padding_idx": None, **settings})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by load_state_dict, with groups that may be of an earlier version."""
        super().__setstate__(state)
        self._padding, self._backends = None, {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        for param in self._params():
            follow(param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its settings as the constructor does."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            self.update_settings(added)
            for name in _NOT_SUPPORTED:
                if added.get(name):
                    raise ValueError(
                        f"{type(self).__name__}: {name} is not supported; leave it out"
                    )
            for param in added["params"]:
                self._check_table(param, added["padding_idx"])
            # Tables of TorchRec are on `meta` at first, and their modules are replaced.
            lookups = [p for p in added["params"] if p.requires_grad and not p.is_meta]
            visit_modules(lookups, type(self).__name__)
        except ValueError:
            self.param_groups.pop()
            raise
        self._padding = None
        for param in lookups:
            follow(param)

    @classmethod
    def update_settings(cls, group: Mapping[str, Any]) -> UpdateSettings:
        """The settings of a param group, checked together with its learning rate.

        Raises:
            ValueError: a setting is out of range.
        """
        try:
            if not (math.isfinite(group["lr"]) and group["lr"] >= 0):
                raise ValueError(f"lr is {group['lr']!r}; write a number of at least 0")
            rule = cls.rule_type(
                **{field.name: _hashable(group[field.name]) for field in fields(cls.rule_type)}
            )
            common = {name: group[name] for name in _COMMON}
            if common["clip"] is None:
                common["clip"] = CowClip(granularity="none")
            return UpdateSettings(rule=rule, **common)
        except ValueError as wrong:
            raise ValueError(f"{cls.__name__}: {wrong}") from None

    @classmethod
    def defaults_with(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of the optimizer made with these keyword arguments, `lr` included.

        Raises:
            ValueError, TypeError: as the constructor.
        """
        (group,) = cls([torch.zeros(1, 1)], **arguments).param_groups
        return group

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Tensor] | None = None,
        *,
        counts: Mapping[Tensor, Tensor] | None = None,
    ) -> Tensor | None:
        """Update every table that has a gradient.

        Args:
            closure: computes the loss and the gradients.
            counts: by parameter, `[rows]` integers: how often each row occurred since the last
                step. For gradients that do not tell it: dense ones, and coalesced ones.

        Returns:
            The closure's loss, if a closure was given.

        Raises:
            ValueError: a gradient does not tell how often each id occurred, or the table's module
                has options that cannot be kept.
            NonFiniteGradientError: a gradient is not finite, under `on_nonfinite="error"`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = self._read_gradients({} if counts is None else counts)
        if updates:
            update_([update for _, update in updates])
        for param, _ in updates:
            self.state[param]["step"] += 1
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; unlike torch, states of fp16 and bf16 tables stay float32."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for param, index in zip(self._params(), saved, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if name != "step" and torch.is_tensor(value):
                    self.state[param][name] = value.to(param.device, state_dtype(param))

    def _read_gradients(
        self, counts: Mapping[Tensor, Tensor]
    ) -> list[tuple[Tensor, PendingUpdate]]:
        """What is to be done; everything is checked here, so that a refusal changes no table."""
        params = self._params()
        if self._padding is None:
            self._padding = visit_modules(params, type(self).__name__)
        if set(counts) - set(params):
            raise ValueError(
                f"{type(self).__name__}: counts are given for something that is not a table of "
                "this optimizer; write step(counts={module.weight: ...})"
            )
        if len({param.device for param in params}) > 1:
            raise ValueError(
                f"{type(self).__name__}: the tables lie on several devices; make one optimizer "
                "for each device"
            )
        batches = [
            (param, group, settings, row_gradients(param, settings, counts.get(param)))
            for group in self.param_groups
            for settings in (self.update_settings(group),)
            for param in group["params"]
            if param.grad is not None
        ]
        # Names must differ between tables: they tell sums and random numbers apart.
        names = {param: str(position) for position, param in enumerate(params)}
        updates = []
        for param, group, settings, batch in batches:
            array = self._array(param, names[param], settings)
            array.frozen_row = self._frozen_row(param, group["padding_idx"])
            known = self._backends.get(param)
            if known is None or not known.array.is_same(array):
                # Whoever reads the table is not known here, so none of its rows may wait.
                self._backends[param] = choose_backend(array)
            step = int(self.state[param]["step"]) + 1
            update = PendingUpdate(self._backends[param], batch, float(group["lr"]), step)
            updates.append((param, update))
        return updates

    def _array(self, param: Tensor, name: str, settings: UpdateSettings) -> TableArray:
        """The table with its state, which is made at the first step."""
        dim = param.shape[1]
        width, local_width = clipped_columns(settings, dim, 0, dim)
        shapes = settings.rule.state_shapes(len(param), dim, has_rest=width < dim)
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for key, shape in shapes.items():
            if key not in state:
                state[key] = torch.zeros(shape, dtype=state_dtype(param), device=param.device)
            elif state[key].shape != shape:
                raise ValueError(
                    f"{type(self).__name__}: the state {key!r} of a table of shape "
                    f"{tuple(param.shape)} has shape {tuple(state[key].shape)} instead of {shape}; "
                    "load the state_dict of the same class and model"
                )
        states = {key: state[key] for key in shapes}
        shards = (TableShard(name, len(param)),)
        return TableArray(shards, param.detach(), states, width, local_width, settings)

    def _check_table(self, param: Tensor, padding_idx: int | None) -> None:
        table = f"{type(self).__name__}: a parameter of shape {tuple(param.shape)}"
        if param.ndim != 2:
            raise ValueError(
                f"{table} is no table, [rows, dim]; give other parameters to another optimizer"
            )
        if not param.is_floating_point():
            raise ValueError(f"{table} has dtype {param.dtype}; tables are floating-point")
        if not param.is_contiguous():
            raise ValueError(
                f"{table} is not contiguous; write parameter.data = parameter.data.contiguous()"
            )
        if padding_idx is not None and not -len(param) <= padding_idx < len(param):
            raise ValueError(f"{table} has no row {padding_idx!r} to be the padding_idx")

    def _frozen_row(self, param: Tensor, given: int | None) -> int | None:
        found = self._padding.get(param)
        if given is None:
            return found
        row = given % len(param)
        if found not in (None, row):
            raise ValueError(
                f"{type(self).__name__}: padding_idx is {given}, but the module of a table of "
                f"shape {tuple(param.shape)} has padding_idx={found}; give the optimizer none"
            )
        return row

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
