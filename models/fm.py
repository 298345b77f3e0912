"""Factorization machine (Rendle, ICDM 2010, eq. 1 with d = 2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from stampede.models.once import differentiable_once
from stampede.models.registry import NetworkShape


class _SecondOrder(torch.autograd.Function):
    """With the gradient `sum_j e_j - e_i`, for which autograd would take three times the passes."""

    @staticmethod
    def forward(embeddings: Tensor) -> tuple[Tensor, Tensor]:
        total = embeddings.sum(1)
        return 0.5 * (total.square() - embeddings.square().sum(1)).sum(1), total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        embeddings, total = ctx.saved_tensors
        return (total.unsqueeze(1) - embeddings) * grad[:, None, None]


@torch.fx.wrap  # TorchRec's pipelines trace the model; what happens within is not theirs to see.
def second_order(embeddings: Tensor) -> Tensor:
    """`sum_{i<j} <e_i, e_j>`, `[batch]`, of embeddings `[batch, fields, dim]`.

    Computed as `0.5 * sum((sum_i e_i)^2 - sum_i e_i^2)`; differentiable once.
    """
    if torch._C._are_functorch_transforms_active():
        # They differentiate as often as they like.
        return 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1)
    return _SecondOrder.apply(embeddings)[0]


class FM(nn.Module):
    """`sum_{i<j} <e_i, e_j>` over the ids; the first-order term is the model's.

    As in the authors' code, numbers take part in the first-order term only.

    Args:
        shape: not used.
        generator: not used.
    """

    def __init__(self, shape: NetworkShape, generator: torch.Generator) -> None:
        super().__init__()

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]`; numbers are not used."""
        return second_order(embeddings)
