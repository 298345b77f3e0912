# pyright: basic
"""Adam for the dense layers, with epsilon placed as in the authors' code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from stampede.optim.rules import Adam, EpsPlacement, as_setting

# Its checks take longer than a small parameter's step.
_adam = lru_cache(Adam)


class DenseAdam(torch.optim.Optimizer):
    """Fused Adam for dense parameters of any shape, with a choice of where epsilon is added.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: Adam's epsilon.
        l2: adds `2*l2*w` to the gradient; set it per group if only some parameters decay.
        eps_placement: `keras` (the authors' code) or `torch`.
        weight_decay: decoupled decay (AdamW, arXiv 1711.05101): `w = w * (1 - lr*weight_decay)`
            before each step; set it per group if only some parameters decay.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-7,
        l2: float = 0.0,
        eps_placement: EpsPlacement = "keras",
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "l2": l2, "eps_placement": eps_placement}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and make its state, so that a checkpoint can be loaded into it."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            self.state[param] = {"step": torch.zeros((), dtype=torch.float32), **moments}

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Tensor] | None = None, *, found_inf: Tensor | None = None
    ) -> Tensor | None:
        """One step of every parameter that has a gradient.

        Args:
            closure: recomputes the loss.
            found_inf: `[1]` float32 on the parameters' device; 1 leaves parameters and moments
                unchanged but counts the step. None for 0.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_(found_inf)
        return loss

    @torch.no_grad()
    def update_(self, found_inf: Tensor | None = None) -> None:
        """`step` without the hooks that torch puts around it, which a small network waits for."""
        for group in self.param_groups:
            rule = _adam(as_setting(group["betas"]), group["eps"], group["eps_placement"])
            with_grad = [param for param in group["params"] if param.grad is not None]
            steps = [self.state[param]["step"] for param in with_grad]
            if not steps:
                continue
            torch._foreach_add_(steps, 1)
            by_step: dict[int, list[Tensor]] = {}
            for step, param in zip(steps, with_grad, strict=True):
                by_step.setdefault(int(step), []).append(param)
            for step, params in by_step.items():
                keep: float | Tensor = 1.0 - float(group["lr"]) * group["weight_decay"]
                if keep != 1.0:
                    if found_inf is not None:
                        # The host does not wait for the flag.
                        keep = torch.where(found_inf == 1.0, 1.0, keep).squeeze()
                    torch._foreach_mul_(params, keep)
                rule.update_(
                    params,
                    [param.grad for param in params if param.grad is not None],
                    [self.state[param]["exp_avg"] for param in params],
                    [self.state[param]["exp_avg_sq"] for param in params],
                    float(group["lr"]),
                    step,
                    l2=group["l2"],
                    found_inf=found_inf,
                )
