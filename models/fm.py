"""Factorization machine (Rendle, ICDM 2010, eq. 1 with d = 2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from stampede.models import native
from stampede.models.once import differentiable_once
from stampede.models.registry import NetworkShape, register


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
        return (total.unsqueeze(1) - embeddings).mul_(grad[:, None, None])


@torch.fx.wrap  # TorchRec's pipelines trace the model; what happens within is not theirs to see.
def second_order(embeddings: Tensor) -> Tensor:
    """`sum_{i<j} <e_i, e_j>`, `[batch]`, of embeddings `[batch, fields, dim]`.

    Computed as `0.5 * sum((sum_i e_i)^2 - sum_i e_i^2)`; differentiable once.
    """
    if torch._C._are_functorch_transforms_active():
        # They differentiate as often as they like.
        return 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1)
    return _SecondOrder.apply(embeddings)[0]


class _JoinedWithSecondOrder(torch.autograd.Function):
    """Both in one pass over the embeddings, forward and backward; on a CPU."""

    @staticmethod
    def forward(
        embeddings: Tensor, numbers: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        operator = torch.ops.stampede_dense.join
        return operator(embeddings, numbers.contiguous(), dtype == torch.bfloat16)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0], output[2])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, of_joined: Tensor, of_interaction: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None]:
        embeddings, total = ctx.saved_tensors
        grad = torch.ops.stampede_dense.join_backward(
            of_joined.contiguous(), of_interaction.contiguous(), embeddings, total
        )
        return grad, None, None


def joined_with_second_order(embeddings: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """`[e_1 .. e_F, x]`, `[batch, fields * dim + n]`, and `second_order`.

    In training on a CPU that is one pass, and the first is bfloat16 where autocast says so. Without
    gradients plain torch computes it, so that an exported model gives the same bits.

    Args:
        embeddings: `[batch, fields, dim]`.
        numbers: `[batch, n]`, which need no gradient.
    """
    dtype = native.computing_dtype(embeddings)
    is_plain = embeddings.dtype == numbers.dtype == torch.float32 and embeddings.stride(2) == 1
    is_trained = embeddings.requires_grad and not numbers.requires_grad
    if dtype is None or not is_plain or not is_trained:
        return torch.cat([embeddings.flatten(1), numbers], 1), second_order(embeddings)
    return _JoinedWithSecondOrder.apply(embeddings, numbers, dtype)[:2]


@register("fm", first_order=True)
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
