"""Helen as a torch optimizer, for plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from stampede.optim.helen.perturbation import (
    HelenSettings,
    check_at_least_0,
    perturbation,
)
from stampede.optim.rows import RowGradients, sum_by_row
from stampede.optim.rules.adam import adam_
from stampede.optim.sweep import SWEEP_ELEMENTS
from stampede.optim.unmatched import explain_to_torchrec


class Helen(torch.optim.Optimizer):
    """Adam with Helen's perturbation, in plain PyTorch.

    In TorchRec, name it in `apply_optimizer_in_backward` and pass `cowclip_sharders()`: every
    second backward pass updates the tables, see `stampede.optim.sharded.helen`.

    In plain PyTorch every param group has a `kind`:

    - `embedding`: tables of `nn.Embedding(sparse=True)` or `nn.EmbeddingBag(sparse=True)`, whose
      uncoalesced gradient has one entry per occurrence of an id and so carries the counts (not of
      a `padding_idx`). They are perturbed, and updated with the second gradient.
    - `dense`: everything else, with the first-order (dim 1) tables, which the repository treats
      so; these may be sparse. With `net_pert=False` they stay in place and are updated with the
      *first* gradient; with True they move by `rho * g / norm` and take the second.

    Args:
        params: groups, each with `params` and `kind`; any setting below may be given per group.
        lr: learning rate.
        rho, bound, betas, eps, weight_decay, rows, l2: see `HelenSettings`.
        net_pert: whether dense parameters are perturbed. The repository's configuration says
            False, its README and the default of its class True.
        kind: of groups that do not say.
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
    ) -> None:
        settings = HelenSettings(rho, bound, tuple(betas), eps, weight_decay, rows, l2, columns)
        defaults = {"lr": lr, "net_pert": net_pert, "dense_norm": dense_norm, "kind": kind}
        explain_to_torchrec()
        super().__init__(params, defaults | vars(settings))
        self._first: dict[Tensor, _First] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._first = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its settings as the constructor does."""
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @classmethod
    def table_settings(cls, arguments: dict[str, Any]) -> tuple[HelenSettings, float]:
        """Settings and learning rate of a sharded table given these keyword arguments.

        Raises:
            ValueError, TypeError: as the constructor, or they have no meaning for a table.
        """
        (group,) = cls([torch.zeros(1, 1)], **arguments).param_groups
        if group["net_pert"] or group["kind"] == "dense":
            raise ValueError(
                "Helen: net_pert and kind='dense' concern dense layers, which sharded tables do "
                "not see; leave them out"
            )
        return _settings(group), float(group["lr"])

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:
        """One step; unlike the repository's, it has both gradients computed.

        Args:
            closure: computes the loss of the batch and its gradients; called twice. Gradients are
                cleared before the second call.

        Returns:
            The loss of the first call: of the weights before this step.
        """
        if closure is None:
            raise ValueError("Helen: step needs a closure; without, use first_step, second_step")
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
        """Perturb with the gradients at hand, remember what was there, clear the gradients.

        Raises:
            RuntimeError: the previous first step has not been followed by a second.
            ValueError: a table's gradient does not tell how often each id occurred.
        """
        if self._first is not None:
            raise RuntimeError("Helen: first_step was called twice; call second_step in between")
        batches = {
            param: _gradient(param, group) for group, param in self._all() if param.grad is not None
        }
        groups = {param: group for group, param in self._all() if param in batches}
        norms = {
            param: _norm(_as_table(param), batch, _settings(groups[param]))
            for param, batch in batches.items()
        }
        dense_norms = _dense_norms(norms, groups)
        self._first = {}
        for param, batch in batches.items():
            group = groups[param]
            if group["kind"] == "dense" and not group["net_pert"]:
                self._first[param] = _First(batch)
                continue
            norm, bound = norms[param], group["bound"]
            if group["kind"] == "dense":
                norm, bound = dense_norms[group["dense_norm"]].to(param.device), 1.0
            self._first[param] = _move_(_as_table(param), batch, norm, bound, _settings(group))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Undo the perturbation and update with the gradients at hand.

        Raises:
            RuntimeError: there was no first step.
        """
        if self._first is None:
            raise RuntimeError("Helen: second_step without first_step")
        first = {param: self._first.get(param, _First()) for _, param in self._all()}
        # Before the weights return, because the L2 part is that of the perturbed ones.
        batches = {
            param: first[param].batch or _gradient(param, group)
            for group, param in self._all()
            if first[param].batch or param.grad is not None
        }
        self.restore()
        for group, param in self._all():
            if param in batches:
                self._update(param, group, batches[param], first[param].stretch)

    @torch.no_grad()
    def restore(self) -> None:
        """Undo `first_step`, bit for bit; without one, do nothing."""
        for param, first in (self._first or {}).items():
            if first.rows is not None:
                _as_table(param).index_copy_(0, first.rows, first.weights)
        self._first = None

    def _all(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        return ((group, param) for group in self.param_groups for param in group["params"])

    def _update(
        self, param: Tensor, group: dict[str, Any], batch: RowGradients, stretch: float
    ) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        arrays = [_as_table(array) for array in (param, state["exp_avg"], state["exp_avg_sq"])]
        _update_(arrays, batch, _settings(group), stretch, float(group["lr"]), int(state["step"]))


@dataclass
class _First:
    """What the first pass leaves of one parameter for the second.

    Attributes:
        batch: the gradient to update with, if that is the first pass's.
        rows: `[n]` rows that moved, or None if none did.
        weights: `[n, dim]` where they were.
        stretch: factor of the perturbation `stretch * w` of rows with no gradient but that of
            L2. It is not carried out: no lookup reads those rows.
    """

    batch: RowGradients | None = None
    rows: Tensor | None = None
    weights: Tensor | None = None
    stretch: float = 0.0


def _gradient(param: Tensor, group: dict[str, Any]) -> RowGradients:
    """The gradient with its L2 part; of a dense parameter every row counts as seen once."""
    grad = param.grad
    if group["kind"] == "embedding":
        if grad.layout == torch.strided:
            raise ValueError(
                f"Helen: the gradient of a parameter of shape {tuple(param.shape)} is dense and "
                "does not tell how often each id occurred; build the table with sparse=True, or "
                "put the parameter into a group of kind 'dense'"
            )
        if grad.is_coalesced() and grad._nnz() > 1:
            raise ValueError(
                f"Helen: the sparse gradient of a parameter of shape {tuple(param.shape)} is "
                "coalesced, so the counts of its ids are lost; usual causes are grad.coalesce(), "
                "DistributedDataParallel and the unscaling of a GradScaler"
            )
    table = _as_table(param)
    if grad.layout == torch.strided:
        rows = torch.arange(len(table), device=grad.device)
        # A copy, because the second backward may write over the first one's gradient.
        batch = RowGradients(rows, grad.reshape(table.shape).clone(), torch.ones_like(rows))
    else:
        batch = sum_by_row(grad._indices()[0], grad._values())
    if group["l2"]:
        batch.grads.add_(table[batch.rows], alpha=2.0 * group["l2"])
    return batch


def _as_table(array: Tensor) -> Tensor:
    """A parameter of any shape as `[rows, dim]`, sharing its memory."""
    return array.view(len(array), -1) if array.dim() else array.view(1, 1)


def _norm(table: Tensor, batch: RowGradients, settings: HelenSettings) -> Tensor:
    """Norm of the gradient of the whole table, with the L2 part of rows outside the batch."""
    norm = torch.linalg.vector_norm(batch.grads)
    if settings.l2 == 0.0 or settings.rows == "touched" or len(batch.rows) == len(table):
        return norm
    inside = table[batch.rows].square().sum()
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


def _move_(
    table: Tensor, batch: RowGradients, norm: Tensor, bound: float, settings: HelenSettings
) -> _First:
    """Perturb the rows of the batch, in place."""
    weights = table[batch.rows]
    if len(batch.rows):
        max_count = batch.counts.max()
        moved = perturbation(batch.grads, batch.counts, norm, max_count, settings.rho, bound)
        table.index_copy_(0, batch.rows, weights + moved)
    stretch = 0.0
    if settings.l2 and settings.rows == "all":
        stretch = float(settings.stretch(norm, bound))
    return _First(None, batch.rows, weights, stretch)


def _update_(
    arrays: list[Tensor],
    batch: RowGradients,
    settings: HelenSettings,
    stretch: float,
    lr: float,
    step: int,
) -> None:
    """Adam on weights and moments, each `[rows, dim]`, in place."""

    def adam(parts: Iterable[tuple[Tensor, ...]], decay: float) -> None:
        weights, grads, exp_avgs, exp_avg_sqs = zip(*parts, strict=True)
        adam_(
            weights,
            grads,
            exp_avgs,
            exp_avg_sqs,
            step=step,
            lr=lr,
            betas=settings.betas,
            eps=settings.eps,
            eps_placement="torch",
            l2=decay / 2.0,
        )

    whole = len(batch.rows) == len(arrays[0])
    picked = arrays if whole else [array[batch.rows] for array in arrays]
    adam([(picked[0], batch.grads, *picked[1:])], settings.weight_decay)
    if whole:
        return
    if settings.rows == "all":
        weights, *moments = (array.view(-1).split(SWEEP_ELEMENTS) for array in arrays)
        zero = torch.zeros_like(weights[0])
        zeros = [zero[: len(part)] for part in weights]
        decay = settings.weight_decay + 2.0 * settings.l2 * (1.0 + stretch)
        adam(zip(weights, zeros, *moments, strict=True), decay)
    for array, values in zip(arrays, picked, strict=True):
        array.index_copy_(0, batch.rows, values)


def _settings(group: dict[str, Any]) -> HelenSettings:
    """The checked settings of a param group."""
    names = HelenSettings.__dataclass_fields__
    return HelenSettings(**{name: group[name] for name in names} | {"betas": tuple(group["betas"])})


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError if a setting is missing or out of range."""
    _settings(group)
    check_at_least_0("lr", group["lr"])
    choices = {
        "kind": ("embedding", "dense"),
        "net_pert": (False, True),
        "dense_norm": ("all", "last_table"),
    }
    for name, (one, other) in choices.items():
        if group.get(name) not in (one, other):
            raise ValueError(
                f"Helen: {name} of a param group is {group.get(name)!r}; write {one!r} or {other!r}"
            )
