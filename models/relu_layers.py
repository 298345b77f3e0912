"""Dense layers with ReLU, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import functional

from stampede.models import native
from stampede.models.once import differentiable_once

# Columns that are 16 bytes in bf16; in float32 half of them would do.
_ALIGNED = 8


class _ReluLayers(torch.autograd.Function):
    """On a CPU, and a layer of one output after them."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, output: Tensor | None, dtype: torch.dtype, *parameters: Tensor
    ) -> Tensor:
        weights, biases = parameters[::2], parameters[1::2]
        inputs = inputs.to(dtype).contiguous()
        activations = [inputs, *native.relu_layers(inputs, weights, biases)]
        ctx.save_for_backward(output, *weights, *activations)
        last = activations[-1]
        return last if output is None else native.single_output(last, output).to(dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, *saved = ctx.saved_tensors
        layers = len(saved) // 2
        weights, activations = saved[:layers], saved[layers:]
        of_inputs_is_needed, of_output_is_needed, _, *are_needed = ctx.needs_input_grad
        # Below these nothing has a gradient.
        lowest = 0 if of_inputs_is_needed else _first(are_needed, default=2 * layers) // 2
        # Gradients take the memory of activations that nobody will need again.
        in_place = not (torch._C._autograd._get_current_graph_task_keep_graph() or _is_batch(grad))
        of_output, last = None, activations[-1]
        if output is None:
            # These are the caller's.
            grad, of_bias = native.relu_backward(grad.to(last.dtype).contiguous(), last)
        else:
            if in_place:
                # Should this fail, torch then knows that they are not what they were.
                increment_version(last)
            grad, of_bias, of_output = native.single_output_backward(
                grad.float().contiguous(), last, output, into_inputs=in_place
            )
        found: list[Tensor | None] = [None] * (2 * layers)
        for layer in reversed(range(lowest, layers)):
            below = activations[layer]
            if are_needed[2 * layer]:
                found[2 * layer] = native.transposed_product(grad, below)
            found[2 * layer + 1] = of_bias
            if layer > lowest:
                if in_place:
                    increment_version(below)
                grad, of_bias = native.masked_inputs_gradient(
                    grad, weights[layer], below, into_mask=in_place
                )
        of_inputs = native.inputs_gradient(grad, weights[0]) if of_inputs_is_needed else None
        return of_inputs, of_output if of_output_is_needed else None, None, *found


def _first(flags: Sequence[bool], default: int) -> int:
    return next((number for number, flag in enumerate(flags) if flag), default)


def _is_batch(grad: Tensor) -> bool:
    """Whether a call stands for many, of which each reads the same activations."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)


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
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    column = None if output is None else output.weight
    dtype = _dtype_of_kernels(inputs, [*parameters, *([] if column is None else [column])])
    if dtype is None or not layers:
        for layer in layers:
            inputs = torch.relu(_aligned_linear(inputs, layer.weight, layer.bias))
        return inputs if output is None else functional.linear(inputs, column)
    return _ReluLayers.apply(inputs, column, dtype, *parameters)


def _aligned_linear(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`functional.linear`; on a GPU with columns of zeros up to a multiple of 16 bytes.

    NVIDIA's guide to matrix products asks for such rows; what it brings here was not measured yet.
    """
    missing = -inputs.shape[-1] % _ALIGNED if _is_aligned_faster(inputs) else 0
    if missing:
        inputs, weight = (functional.pad(one, (0, missing)) for one in (inputs, weight))
    return functional.linear(inputs, weight, bias)


def _is_aligned_faster(inputs: Tensor) -> bool:
    return inputs.is_cuda


def _dtype_of_kernels(inputs: Tensor, parameters: Sequence[Tensor]) -> torch.dtype | None:
    """What the kernels compute in; None where they cannot, or are not to."""
    dtype = native.computing_dtype(inputs) if torch.is_grad_enabled() else None
    # While a graph is captured the shape is not to be looked at.
    if dtype is None or inputs.dim() != 2 or not len(inputs):
        return None
    fit = all(
        type(parameter) is nn.Parameter
        and parameter.dtype == torch.float32
        and parameter.device.type == "cpu"
        and parameter.numel() > 0
        for parameter in parameters
    )
    return dtype if fit else None
