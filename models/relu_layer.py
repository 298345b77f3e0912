"""A dense layer with ReLU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stampede.models import native


class _ReluLayer(torch.autograd.Function):
    """On a CPU. Its backward masks the gradient and sums it for the bias in one pass."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> Tensor:
        inputs, weight = inputs.to(dtype), weight.to(dtype)
        output = functional.linear(inputs, weight, bias.to(dtype))
        # oneDNN's product with a ReLU within it would make a NaN 0, and nobody would see it.
        output.relu_() if dtype == torch.float32 else torch.ops.stampede_dense.relu_(output)
        ctx.save_for_backward(output, inputs, weight)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, inputs, weight = ctx.saved_tensors
        operator = torch.ops.stampede_dense.relu_backward
        masked, of_bias = operator(grad.to(output.dtype).contiguous(), output)
        of_inputs = masked @ weight if ctx.needs_input_grad[0] else None
        return of_inputs, native.transposed_product(masked, inputs), of_bias, None


def relu_layer(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`relu(inputs @ weight.T + bias)`.

    Differentiable once where the C++ kernels are used.

    Args:
        inputs: `[..., columns]`.
        weight: `[outputs, columns]`.
        bias: `[outputs]`.
    """
    dtype = native.computing_dtype(inputs)
    # While a graph is captured the shape is not to be looked at.
    if dtype is None or weight.dtype != torch.float32 or inputs.dim() != 2 or not len(inputs):
        return torch.relu(functional.linear(inputs, weight, bias))
    return _ReluLayer.apply(inputs, weight, bias, dtype)
