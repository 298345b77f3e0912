"""First- and second-order terms of looked-up rows, and the inputs of an MLP beside them."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.nn import functional

from stampede.models import cpu
from stampede.models.embedding_front import StoredColumns


class _SecondOrder(torch.autograd.Function):
    """With the gradient `sum_j e_j - e_i`; autograd would take three times as many passes."""

    @staticmethod
    def forward(embeddings: Tensor) -> tuple[Tensor, Tensor]:
        total = embeddings.sum(1)
        return 0.5 * (total.square() - embeddings.square().sum(1)).sum(1), total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        embeddings, total = ctx.saved_tensors
        return (total.unsqueeze(1) - embeddings) * grad[:, None, None]


@torch.fx.wrap  # Symbolic tracing must not see the branches within.
def second_order(embeddings: Tensor) -> Tensor:
    """`sum_{i<j} <e_i, e_j>`, `[batch]`, of embeddings `[batch, fields, dim]`.

    Computed as `0.5 * sum((sum_i e_i)^2 - sum_i e_i^2)`; differentiable once.
    """
    if torch._C._are_functorch_transforms_active():
        # These may differentiate twice.
        return 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1)
    return _SecondOrder.apply(embeddings)[0]


class _JoinedWithOrders(torch.autograd.Function):
    """One pass over the rows in forward, one in backward; on a CPU."""

    @staticmethod
    def forward(
        ctx: Any,
        stored: Tensor,
        dim: int,
        numbers: Tensor,
        number_weights: Tensor | None,
        scale: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        stored, numbers = stored.contiguous(), numbers.contiguous()
        weights = None if number_weights is None else number_weights.contiguous()
        joined, orders, total = torch.ops.stampede_dense.join(
            stored, dim, numbers, weights, scale, dtype == torch.bfloat16
        )
        ctx.save_for_backward(stored, total, numbers)
        ctx.dim, ctx.scale = dim, scale
        return joined, orders

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, of_joined: Tensor, of_orders: Tensor) -> tuple[Tensor | None, ...]:
        stored, total, numbers = ctx.saved_tensors
        given = of_joined.contiguous(), of_orders.contiguous(), stored, ctx.dim, total, numbers
        found = torch.ops.stampede_dense.join_backward(*given, ctx.scale)
        needs_stored, _, _, needs_weights, *_ = ctx.needs_input_grad
        of_stored = found[0] if needs_stored else None
        of_weights = found[1] if needs_weights else None
        return of_stored, None, None, of_weights, None, None


def joined_with_orders(
    stored: Tensor,
    dim: int,
    numbers: Tensor,
    number_weights: Tensor | None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`[e_1 .. e_F, x]` and `scale * (sum_f w_f + <w, x>) + sum_{i<j} <e_i, e_j>` of each sample.

    In training on a CPU this is one pass over the rows, differentiable once; the first result has
    autocast's dtype, the second is float32. Without gradients it uses plain torch, so that an
    exported model gives the same bits.

    Args:
        stored: `[batch, fields, stored width]`, see `StoredColumns`; `dim` columns of an embedding.
        numbers: `[batch, n]`.
        number_weights: `[1, n]`, the first-order weights `w` of the numbers, or None.

    Returns:
        `[batch, fields * dim + n]` and `[batch]`.
    """
    dtype = None
    if torch.is_grad_enabled() and stored.requires_grad and not numbers.requires_grad:
        dtype = cpu.computing_dtype(stored, numbers, number_weights)
    if dtype is not None and stored.dtype == torch.float32:
        return _JoinedWithOrders.apply(stored, dim, numbers, number_weights, scale, dtype)
    embeddings, first_order = StoredColumns(dim).split(stored)
    orders = second_order(embeddings) + scaled(first_order.squeeze(-1).sum(1), scale)
    if number_weights is not None:
        orders = orders + scaled(functional.linear(numbers, number_weights).squeeze(1), scale)
    return torch.cat([embeddings.flatten(1), numbers], 1), orders


def scaled(values: Tensor, scale: float) -> Tensor:
    """`scale * values`; a scale of 1 costs nothing."""
    return values if scale == 1.0 else scale * values
