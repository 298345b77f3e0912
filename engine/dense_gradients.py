"""Gradients of the dense layers, which every rank holds a copy of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def average_gradients_(parameters: Iterable[Tensor], world_size: int) -> None:
    """Replace the gradients by their means over the ranks, in one exchange, in place.

    A parameter without gradient has one of zeros: the samples of another rank may give it one.
    """
    grads = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grads.append(parameter.grad)
    if world_size == 1 or not grads:
        return
    together = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(together)
    together /= world_size
    for grad, mean in zip(grads, together.split([g.numel() for g in grads]), strict=True):
        grad.copy_(mean.view_as(grad))
