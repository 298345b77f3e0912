"""A dense layer with ReLU."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stampede.models import native


class _ReluLayer(torch.autograd.Function):
    """On a CPU. Its backward masks the gradient and sums it for the bias in one pass."""

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if inputs.dtype == torch.bfloat16:
            # oneDNN's product with ReLU within it; in float32 it is no faster.
            operator = torch.ops.mkldnn._linear_pointwise
            return operator(inputs, weight, bias.to(inputs.dtype), "relu", [], "")
        return functional.linear(inputs, weight, bias).relu_()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1], output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        inputs, weight, output = ctx.saved_tensors
        operator = torch.ops.stampede_dense.relu_backward
        masked, of_bias = operator(grad.to(output.dtype).contiguous(), output)
        of_inputs = masked @ weight if ctx.needs_input_grad[0] else None
        return of_inputs, masked.t() @ inputs, of_bias


@torch.fx.wrap  # TorchRec's pipelines trace the model; the branch is not theirs to see.
def relu_layer(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`relu(inputs @ weight.T + bias)`.

    Differentiable once where the C++ kernels are used.

    Args:
        inputs: `[..., columns]`.
        weight: `[outputs, columns]`.
        bias: `[outputs]`.
    """
    dtype = native.computing_dtype(inputs) if inputs.dim() == 2 and len(inputs) else None
    if dtype is None or weight.dtype != torch.float32:
        return torch.relu(functional.linear(inputs, weight, bias))
    return _ReluLayer.apply(inputs.to(dtype), weight.to(dtype), bias)
