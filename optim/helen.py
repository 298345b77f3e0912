"""Helen: sharpness-aware training, each id perturbed by how frequent it is.

Source: "Helen: Optimizing CTR Prediction Models with Frequency-wise Hessian Eigenvalue
Regularization" (arXiv 2403.00798) and the authors' code, NUS-HPC-AI-Lab/Helen, called the
repository. Every step takes two gradients of one batch: the first moves the tables towards a higher
loss; the second, taken there, updates the original weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from stampede.optim.backends import choose_backend
from stampede.optim.backends.torch import PendingUpdate
from stampede.optim.row_gradients import (
    TableOptimizer,
    ids_behind,
    padding_of,
    refuse_unknown,
    row_gradients,
)
from stampede.optim.rows import RowGradients
from stampede.optim.rules import as_betas, check_number
from stampede.optim.settings import HelenSettings, UpdateSettings
from stampede.optim.table_array import TableArray, TableShard, state_dtype
from stampede.optim.update import update_

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Helen(TableOptimizer):
    """Adam with Helen's perturbation, in plain PyTorch.

    In TorchRec, name it in `apply_optimizer_in_backward` and pass `cowclip_sharders()`: every
    second backward pass updates the tables, see `stampede.optim.sharded.helen`.

    In plain PyTorch every param group has a `kind`:

    - `embedding`: tables of `nn.Embedding(sparse=True)` or `nn.EmbeddingBag(sparse=True)`, whose
      uncoalesced gradient has one entry per occurrence of an id and so carries the counts; several
      lookups add up. They are perturbed, and updated with the second gradient.
    - `dense`: everything else, with the first-order (dim 1) tables, which the repository treats
      so; these may be sparse. With `net_pert=False` they stay in place and are updated with the
      *first* gradient; with True they move by `rho * g / norm` and take the second.

    Create the optimizer before the first lookup, as `CowClipOptimizer`. Rows of a module's
    `padding_idx` are never changed.

    Args:
        params: groups, each with `params` and `kind`; any setting below may be given per group.
        lr: learning rate.
        rho, bound, betas, eps, weight_decay, rows, l2: see `HelenSettings`.
        net_pert: whether dense parameters are perturbed. The repository's configuration says
            False, its README and the default of its class True.
        kind: of groups without one.
        columns: for sharded tables, see `HelenSettings`.
        dense_norm: the norm that `net_pert` divides by. `all`: of all gradients together, tables
            included. `last_table`: of the last table's gradient, which is what the repository
            does, because its loop over the tables reuses the variable.

    Raises:
        ValueError: a setting is out of range.

    Example::

        table, top = nn.Embedding(1000, 16, sparse=True), nn.Linear(16, 1)
        optimizer = Helen([
            {"params": table.parameters(), "kind": "embedding"},
            {"params": top.parameters(), "kind": "dense"},
        ])
        def closure():
            loss = top(table(ids)).square().mean()
            loss.backward()
            return loss
        optimizer.zero_grad()
        optimizer.step(closure)
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        rho: float = 0.05,
        bound: float = 0.3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rows: Literal["all", "touched"] = "all",
        l2: float = 0.0,
        net_pert: bool = False,
        dense_norm: Literal["all", "last_table"] = "all",
        columns: int | None = None,
        kind: Literal["embedding", "dense"] = "embedding",
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        betas = as_betas(betas)
        settings = HelenSettings(rho, bound, betas, eps, weight_decay, rows, l2, columns)
        defaults = {"lr": lr, "net_pert": net_pert, "dense_norm": dense_norm, "kind": kind}
        self._first: dict[Tensor, _First] | None = None
        super().__init__(params, defaults | vars(settings))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._first = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its settings as the constructor does."""
        group = {**self.defaults, **param_group}
        _settings_of(group)
        check_number("Helen: lr", group["lr"])
        super().add_param_group(param_group)

    @classmethod
    def table_settings(cls, arguments: dict[str, Any]) -> tuple[HelenSettings, float]:
        """Settings and learning rate of a sharded table given these keyword arguments."""
        (group,) = cls([torch.zeros(1, 1)], **arguments).param_groups
        return _settings_of(group), float(group["lr"])

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """One step; unlike the repository's, it computes both gradients.

        Args:
            closure: computes the loss of the batch and its gradients; called twice. Gradients are
                cleared before the second call.

        Returns:
            The loss of the first call: of the weights before this step.
        """
        with torch.enable_grad():
            loss = closure()
        self.first_step()
        try:
            with torch.enable_grad():
                closure()
            self.second_step()
        finally:
            self.restore()
        return loss

    @torch.no_grad()
    def first_step(self) -> None:
        """Perturb with the current gradients, save the original weights, clear the gradients.

        Raises:
            RuntimeError: the previous first step has not been followed by a second.
            ValueError: a table's gradient does not tell how often each id occurred.
        """
        if self._first is not None:
            raise RuntimeError("Helen: first_step was called twice; call second_step in between")
        slopes, norms, first, groups = {}, {}, {}, self._groups()
        for param, group in groups.items():
            if param.grad is None:
                continue
            batch, table = _gradient(param, group), _as_table(param)
            first[param], slopes[param] = _First(batch), batch
            if group["l2"]:
                grads = torch.add(batch.grads, table[batch.rows], alpha=2.0 * group["l2"])
                slopes[param] = batch._replace(grads=grads)
            norms[param] = _gradient_norm(param, slopes[param], _settings_of(group))
        self._first, together = first, _dense_norms(norms, groups)
        for param, slope in slopes.items():
            group, norm, table = groups[param], norms[param], _as_table(param)
            settings = _settings_of(group)
            if group["kind"] == "dense":
                if not group["net_pert"]:
                    continue
                norm = together[group["dense_norm"]].to(param.device)
                settings = replace(settings, bound=1.0)
            rows, weights = slope.rows, table[slope.rows]
            if len(rows):
                moved = settings.perturbation(slope.grads, slope.counts, norm, slope.counts.max())
                table.index_copy_(0, rows, (weights + moved).to(table.dtype))
            first[param] = _First(None, rows, weights, settings.swept_decay_factor(norm[None]))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Undo the perturbation and update with the current gradients.

        Raises:
            ValueError: as in `first_step`.
            NonFiniteGradientError: a table's gradient is not finite; no weight was changed.
        """
        first, groups = self._first, self._groups()
        batches, moved = {}, {}
        for param, group in groups.items():
            left = first.get(param, _First())
            if left.batch is None and param.grad is None:
                continue
            batches[param] = batch = left.batch or _gradient(param, group)
            if group["l2"] and left.rows is not None:
                moved[param] = _as_table(param)[batch.rows]
        self.restore()
        # The update adds the L2 term of the original weights; correct it to that of the moved ones.
        for param, weights in moved.items():
            weights -= _as_table(param)[batches[param].rows]
            batches[param].grads.add_(weights, alpha=2.0 * groups[param]["l2"])
        # Tables of one device together; whole dense parameters one by one.
        by_device: dict[torch.device, list[PendingUpdate]] = {}
        whole = []
        for position, (param, group) in enumerate(groups.items()):
            if param not in batches:
                continue
            array = self._array(str(position), param, group)
            # Rows that are not in the batch may have been perturbed: a sweep steps them.
            update = PendingUpdate(
                choose_backend(array, replays=False),
                batches[param],
                float(group["lr"]),
                int(self.state[param]["step"]) + 1,
                first.get(param, _First()).decay_factor,
            )
            is_whole = len(update.batch.rows) == len(array.weights) and not array.is_rounded()
            if group["kind"] == "dense" and is_whole:
                whole.append(update)
            else:
                by_device.setdefault(param.device, []).append(update)
        for tables in by_device.values():
            update_(tables)
        for update in whole:
            settings = update.array.settings
            tensors = (update.array.weights, update.batch.grads, *update.array.states.values())
            settings.rule.update_(*([t] for t in tensors), update.lr, update.step, l2=settings.l2)
        for param in batches:
            self.state[param]["step"] += 1

    @torch.no_grad()
    def restore(self) -> None:
        """Undo `first_step`, bit for bit; without one, do nothing."""
        for param, first in (self._first or {}).items():
            if first.rows is not None:
                _as_table(param).index_copy_(0, first.rows, first.weights)
        self._first = None

    def _groups(self) -> dict[Tensor, dict[str, Any]]:
        return {param: group for group in self.param_groups for param in group["params"]}

    def _array(self, name: str, param: Tensor, group: dict[str, Any]) -> TableArray:
        """A parameter with its state, which is made at the first step."""
        state, table = self.state[param], _as_table(param)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(param, dtype=state_dtype(param))
        moments = {moment: _as_table(state[moment]) for moment in _MOMENTS}
        settings, dim = _settings_of(group).second_pass(), table.shape[1]
        shards, frozen = (TableShard(name, len(table)),), padding_of(param)
        return TableArray(shards, table, moments, dim, dim, settings, frozen_row=frozen)


def _settings_of(group: dict[str, Any]) -> HelenSettings:
    """The checked settings of a param group."""
    names = HelenSettings.__dataclass_fields__
    betas = as_betas(group["betas"])
    return HelenSettings(**{name: group[name] for name in names} | {"betas": betas})


@dataclass
class _First:
    """What the first pass leaves of one parameter for the second."""

    batch: RowGradients | None = None  # The gradient to update with, if that is the first pass's.
    rows: Tensor | None = None  # `[n]` rows that moved.
    weights: Tensor | None = None  # `[n, dim]` before the move.
    decay_factor: Tensor | None = None  # See `PendingUpdate`; rows outside the batch do not move.


def _as_table(array: Tensor) -> Tensor:
    """A parameter of any shape as `[rows, dim]`, sharing its memory."""
    return array.view(len(array), -1) if array.dim() else array.view(1, 1)


def _gradient(param: Tensor, group: dict[str, Any]) -> RowGradients:
    """The gradient without L2 term and padding row; dense rows count as seen once."""
    counted, settings = group["kind"] == "embedding", _settings_of(group)
    grad, name = param.grad, f"the gradient of a parameter of shape {tuple(param.shape)}"
    if grad.layout == torch.strided:
        if counted:
            raise ValueError(
                f"Helen: {name} is dense and does not tell how often each id occurred; build the "
                "table with sparse=True, or put the parameter into a group of kind 'dense'"
            )
        table = _as_table(param)
        rows = torch.arange(len(table), device=grad.device)
        # A copy, because the second backward may write over the first one's gradient.
        batch = RowGradients(rows, grad.reshape(table.shape).clone(), torch.ones_like(rows))
    else:
        if counted and ids_behind(param) is None:
            raise ValueError(
                f"Helen: {name} is coalesced, so the counts of its ids are lost; usual causes are "
                "grad.coalesce(), DistributedDataParallel and the unscaling of a GradScaler"
            )
        # With thresholds for each row the counts are read.
        batch = row_gradients(param, UpdateSettings() if counted else settings.second_pass(), None)
    frozen = padding_of(param)
    return batch if frozen is None else batch.where(batch.rows != frozen)


def _gradient_norm(param: Tensor, batch: RowGradients, settings: HelenSettings) -> Tensor:
    """Norm of the gradient of the whole table, with the L2 term of rows outside the batch."""
    table, frozen_row = _as_table(param), padding_of(param)
    norm = torch.linalg.vector_norm(batch.grads)
    if settings.l2 == 0.0 or settings.rows == "touched" or len(batch.rows) == len(table):
        return norm
    inside = table[batch.rows].square().sum()
    if frozen_row is not None:
        inside = inside + table[frozen_row].square().sum()
    outside = (table.square().sum() - inside).clamp(min=0.0)
    return torch.sqrt(norm.square() + outside * (2.0 * settings.l2) ** 2)


def _dense_norms(
    norms: dict[Tensor, Tensor], groups: dict[Tensor, dict[str, Any]]
) -> dict[str, Tensor]:
    """The norms that a dense parameter's perturbation may be divided by, see `Helen`."""
    if not norms:
        return {}
    device = next(iter(norms)).device
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms.values()]))
    tables = [norms[param] for param in norms if groups[param]["kind"] == "embedding"]
    return {"all": total, "last_table": tables[-1] if tables else total}
