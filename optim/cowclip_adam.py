"""CowClipAdam as a `torch.optim.Optimizer`, and as the settings of a sharded table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from stampede.optim.adam import EpsPlacement
from stampede.optim.clip import CowClip
from stampede.optim.rows import RowGradients, sum_by_row
from stampede.optim.update import Rows, TableState, UpdateSettings, update_

DEFAULT_LR = 1e-4


def check_lr(lr: float) -> float:
    """Return `lr`, or raise ValueError if it is not a finite number of at least 0."""
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"CowClipAdam: lr is {lr!r}; write a number of at least 0")
    return lr


class CowClipAdam(torch.optim.Optimizer):
    """Adam with CowClip for embedding tables.

    In TorchRec, name it in `apply_optimizer_in_backward` and pass `cowclip_sharders()` to
    `DistributedModelParallel`: the update then runs inside the sharded tables' backward. In plain
    PyTorch it is an ordinary optimizer for `nn.Embedding(sparse=True)` and
    `nn.EmbeddingBag(sparse=True, mode="sum")`, whose uncoalesced gradient has one entry per
    occurrence of an id and so carries the counts. A dense gradient has no counts: it is accepted
    only with `clip=None`, and every row then counts as touched.

    Args:
        params: tables, `[rows, dim]`.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: Adam's epsilon.
        l2: coefficient of `||w||^2` in the loss: adds `2*l2*w` to the gradient, inside the clip.
        clip: the clipping rule; `None` for plain Adam.
        rows: `all`, every row takes a step each time (the authors' code), or `touched`, only the
            rows of the batch (TorchRec's and SparseAdam's convention).
        eps_placement: `keras` adds eps to `sqrt(v)` before the bias correction (the authors'
            code), `torch` after it.

    Raises:
        ValueError: a setting is out of range.

    Example::

        table = torch.nn.Embedding(1000, 16, sparse=True)
        optimizer = CowClipAdam(table.parameters(), lr=1e-4, l2=1e-5, clip=CowClip())
        table(ids).sum().backward()
        optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = DEFAULT_LR,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-7,
        l2: float = 0.0,
        clip: CowClip | None = CowClip(),
        rows: Rows = "all",
        eps_placement: EpsPlacement = "keras",
    ) -> None:
        settings = UpdateSettings(tuple(betas), eps, l2, clip, rows, eps_placement)
        defaults = {"lr": check_lr(lr), **{name: getattr(settings, name) for name in _SETTINGS}}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its settings as the constructor does."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        check_lr(added["lr"])
        update_settings(added)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every table that has a gradient.

        Returns:
            The closure's loss, if a closure was given.

        Raises:
            ValueError: a gradient does not tell how often each id occurred.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = update_settings(group)
            for param in group["params"]:
                if param.grad is None:
                    continue
                batch = _row_gradients(param, settings)
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["step"] += 1
                table = TableState(param, state["exp_avg"], state["exp_avg_sq"])
                update_(table, batch, settings, lr=float(group["lr"]), step=int(state["step"]))
        return loss


_SETTINGS = tuple(UpdateSettings.__dataclass_fields__)


def update_settings(group: dict[str, Any]) -> UpdateSettings:
    """The checked `UpdateSettings` of a param group or of keyword arguments of `CowClipAdam`.

    Raises:
        ValueError: a setting is out of range.
    """
    settings = {name: group[name] for name in _SETTINGS if name in group}
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    return UpdateSettings(**settings)


def _row_gradients(param: Tensor, settings: UpdateSettings) -> RowGradients:
    """Rows, summed gradients and counts of a parameter's gradient, or a clear refusal."""
    grad = param.grad
    if grad.layout == torch.strided:
        if settings.clip is not None:
            raise ValueError(
                f"CowClipAdam: the gradient of a parameter of shape {tuple(param.shape)} is dense "
                "and does not tell how often each id occurred; build the table with sparse=True, "
                "or set clip=None"
            )
        rows = torch.arange(len(param), device=param.device)
        return RowGradients(rows, grad.reshape(len(param), -1), torch.ones_like(rows))
    if grad.is_coalesced() and grad._nnz() > 1:
        raise ValueError(
            f"CowClipAdam: the sparse gradient of a parameter of shape {tuple(param.shape)} is "
            "coalesced, so the counts of its ids are lost; usual causes are grad.coalesce(), "
            "DistributedDataParallel and the unscaling of a GradScaler"
        )
    return sum_by_row(grad._indices()[0], grad._values())
