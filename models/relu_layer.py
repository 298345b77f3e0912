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
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> Tensor:
        inputs, weight = inputs.to(dtype), weight.to(dtype)
        if dtype == torch.bfloat16:
            # oneDNN's product with ReLU within it; in float32 it is no faster.
            operator = torch.ops.mkldnn._linear_pointwise
            output = operator(inputs, weight, bias.to(dtype), "relu", [], "")
        else:
            output = functional.linear(inputs, weight, bias).relu_()
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
    return _ReluLayer.apply(inputs, weight, bias, dtype)
