"""Optimizers with CowClip as `torch.optim.Optimizer`, and as the settings of a sharded table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from stampede.optim.clip import CowClip
from stampede.optim.embedding_modules import frozen_rows
from stampede.optim.reduction import PendingUpdate
from stampede.optim.row_gradients import row_gradients
from stampede.optim.rules import Rule
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard, clipped_columns
from stampede.optim.update import update_

_COMMON = tuple(field.name for field in fields(UpdateSettings) if field.name != "rule")


class CowClipOptimizer(torch.optim.Optimizer):
    """Base of the optimizers with CowClip for embedding tables.

    In TorchRec, name one in `apply_optimizer_in_backward` and pass `cowclip_sharders()` to
    `DistributedModelParallel`: the update then runs inside the sharded tables' backward. In plain
    PyTorch it is an ordinary optimizer for `nn.Embedding(sparse=True)` and
    `nn.EmbeddingBag(sparse=True)`, whose uncoalesced gradient has one entry per occurrence of an
    id and so carries the counts; several lookups or backward passes before a step add up. Where
    the gradient has lost the counts, they can be given to `step`. Rows of a module's
    `padding_idx` are never changed.

    Args:
        params: tables, `[rows, dim]`, or param groups.
        lr: learning rate.
        **settings: the fields of the class's rule and of `UpdateSettings`, by name, and
            `padding_idx`: a row that is never changed, where the table belongs to no module.

    Raises:
        ValueError: a setting is out of range.
    """

    rule_type: ClassVar[type[Rule]]

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        settings: Mapping[str, Any],
    ) -> None:
        self._frozen: dict[Tensor, int | None] = {}
        super().__init__(params, {"lr": lr, "padding_idx": None, **settings})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its settings as the constructor does."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            self.update_settings(added)
            for param in added["params"]:
                if param.ndim != 2:
                    raise ValueError(
                        f"a parameter has shape {tuple(param.shape)}, but tables are [rows, dim]; "
                        "give other parameters to another optimizer"
                    )
        except ValueError:
            self.param_groups.pop()
            raise

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
        counts = {} if counts is None else counts
        self._find_frozen_rows()
        # First everything is checked, so that a refusal changes no table.
        pending = [
            (param, group, row_gradients(param, settings.clip, counts.get(param)), settings)
            for group in self.param_groups
            for settings in (self.update_settings(group),)
            for param in group["params"]
            if param.grad is not None
        ]
        updates = [self._pending(*entry) for entry in pending]
        if updates:
            update_(updates)
        for param, _, _, _ in pending:
            self.state[param]["step"] += 1
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; unlike torch, states of fp16 and bf16 tables stay float32."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for param, index in zip(params, saved, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if torch.is_tensor(value) and self.state[param][name].dtype != value.dtype:
                    self.state[param][name] = value.to(param.device, copy=True)

    def _pending(
        self, param: Tensor, group: dict[str, Any], batch: Any, settings: UpdateSettings
    ) -> PendingUpdate:
        array = self._array(param, settings)
        frozen = group["padding_idx"]
        array.frozen_row = self._frozen.get(param) if frozen is None else frozen
        step = int(self.state[param]["step"]) + 1
        return PendingUpdate(array, batch, float(group["lr"]), step)

    def _array(self, param: Tensor, settings: UpdateSettings) -> TableArray:
        """The table with its state, which is made at the first step."""
        state = self.state[param]
        # Names must differ between tables: they tell sums and random numbers apart.
        position = [p is param for g in self.param_groups for p in g["params"]].index(True)
        shards = (TableShard(str(position), len(param)),)
        if not state:
            array = TableArray.create(shards, param, settings, param.shape[1])
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update(array.states)
            return array
        states = {name: value for name, value in state.items() if name != "step"}
        widths = clipped_columns(settings, param.shape[1], 0, param.shape[1])
        return TableArray(shards, param, states, *widths, settings)

    def _find_frozen_rows(self) -> None:
        """Look up the modules of parameters not seen before."""
        params = [param for group in self.param_groups for param in group["params"]]
        unseen = [param for param in params if param not in self._frozen]
        if unseen:
            self._frozen.update(frozen_rows(unseen, type(self).__name__))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
