"""Dense layers with ReLU, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stampede.models import native


class _ReluLayers(torch.autograd.Function):
    """On a CPU, and a layer of one output after them. The loss is a scalar: once differentiable."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, output: Tensor | None, dtype: torch.dtype, *parameters: Tensor
    ) -> Tensor:
        weights, biases = parameters[::2], parameters[1::2]
        activations = [inputs.to(dtype).contiguous()]
        for weight, bias in zip(weights, biases, strict=True):
            activations.append(native.relu_layer(activations[-1], weight, bias))
        ctx.save_for_backward(output, *weights, *activations)
        if output is None:
            return activations[-1]
        return torch.ops.stampede_dense.single_output(activations[-1], output.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, *saved = ctx.saved_tensors
        layers = len(saved) // 2
        weights, activations = saved[:layers], saved[layers:]
        of_output = None
        # Gradients take the memory of activations that nobody will need again.
        in_place = not torch._C._autograd._get_current_graph_task_keep_graph()
        last = activations[-1]
        if output is None:
            # These are the caller's.
            operator = torch.ops.stampede_dense.relu_backward
            grad, of_bias = operator(grad.to(last.dtype).contiguous(), last, False)
        else:
            operator = torch.ops.stampede_dense.single_output_backward
            grad, of_bias, of_output = operator(
                grad.contiguous(), last, output.contiguous(), in_place
            )
        found: list[Tensor | None] = []
        for layer in reversed(range(layers)):
            below = activations[layer]
            found = [native.transposed_product(grad, below), of_bias, *found]
            if layer:
                grad, of_bias = native.masked_inputs_gradient(
                    grad, weights[layer], below, into_mask=in_place
                )
        of_inputs = native.inputs_gradient(grad, weights[0]) if ctx.needs_input_grad[0] else None
        return of_inputs, of_output, None, *found


def relu_layers(
    inputs: Tensor, layers: Sequence[nn.Linear], output: nn.Linear | None = None
) -> Tensor:
    """`relu(x @ weight.T + bias)` of each layer, then `x @ weight.T` of the output.

    Differentiable once where the C++ kernels are used, which is in training. Without gradients
    plain torch computes it, so that an exported model gives the same bits.

    Args:
        inputs: `[..., columns]`.
        layers: with biases.
        output: without a bias, to one column.
    """
    dtype = native.computing_dtype(inputs)
    weights = [layer.weight for layer in (*layers, *([output] if output else []))]
    # While a graph is captured the shape is not to be looked at.
    if (
        dtype is None
        or not torch.is_grad_enabled()
        or any(weight.dtype != torch.float32 for weight in weights)
        or inputs.dim() != 2
        or not len(inputs)
    ):
        for layer in layers:
            inputs = torch.relu(functional.linear(inputs, layer.weight, layer.bias))
        return inputs if output is None else functional.linear(inputs, output.weight)
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    column = None if output is None else output.weight
    return _ReluLayers.apply(inputs, column, dtype, *parameters)
