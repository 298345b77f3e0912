"""Stacks of dense layers, initialised as in the reference code, with C++ kernels on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import functional
from torchrec.modules import mlp as torchrec_mlp

from stampede.models import cpu
from stampede.models.dropout import SampleDropout
from stampede.models.registry import NetworkShape, Normalization

_OPS = torch.ops.stampede_dense
_NORMS = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
# 16 bytes of bf16; in float32 half as many columns would do.
_ALIGNED = 8


def glorot_normal_(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Keras' Glorot normal, in place: normal with `std = sqrt(2 / (fan_in + fan_out))`, cut off
    at two standard deviations and widened so that the cut does not shrink the variance.

    Dimensions before the last two count for both fans.
    """
    fans = sum(weight.shape[-2:]) * math.prod(weight.shape[:-2])
    # Standard deviation of a unit normal cut off at +-2 (Keras' VarianceScaling).
    std = math.sqrt(2.0 / fans) / 0.87962566103423978
    return nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std, generator=generator)


def linear(inputs: int, outputs: int, generator: torch.Generator, *, bias: bool) -> nn.Linear:
    """A layer with Glorot-normal weights and, if it has a bias, zeros for it."""
    return initialize_(nn.Linear(inputs, outputs, bias=bias), generator)


def initialize_(layers: nn.Module, generator: torch.Generator) -> nn.Module:
    """Glorot-normal weights and biases of zeros for all `nn.Linear` within, in place."""
    for layer in layers.modules():
        if isinstance(layer, nn.Linear):
            glorot_normal_(layer.weight, generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return layers


class HiddenLayers(torchrec_mlp.MLP):
    """TorchRec's MLP of ReLU layers, with C++ kernels on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., widths[-1]]` from `[..., inputs]`."""
        plain = _plain_layers(self)
        if plain is None:
            return super().forward(input)
        layers, dropouts = plain
        return relu_layers(input, layers, dropouts=dropouts)


def hidden_layers(
    inputs: int,
    widths: Sequence[int],
    generator: torch.Generator,
    dropout: float = 0.0,
    normalization: Normalization = "none",
) -> HiddenLayers:
    """ReLU layers: `[batch, inputs]` to `[batch, widths[-1]]`.

    With dropout, see `NetworkShape`, each layer is `dropout(relu(x @ weight.T + bias))`. With a
    norm, plain torch computes `dropout(relu(norm(x @ weight.T + bias)))`.
    """
    hidden = HiddenLayers(inputs, list(widths))
    if dropout or normalization != "none":
        for layer, width in zip(hidden._mlp, widths, strict=True):
            norm = [] if normalization == "none" else [_NORMS[normalization](width)]
            # As part of the activation, so that the names of weights do not change.
            layer._activation_fn = nn.Sequential(*norm, nn.ReLU(), nn.Dropout(dropout))
    return initialize_(hidden, generator)


class MLP(nn.Module):
    """ReLU layers, then one linear output without bias: `[batch, inputs]` to `[batch]`."""

    def __init__(self, inputs: int, shape: NetworkShape, generator: torch.Generator) -> None:
        super().__init__()
        self.hidden = hidden_layers(
            inputs, shape.hidden, generator, shape.dropout, shape.normalization
        )
        self.output = linear(shape.hidden[-1], 1, generator, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits `[batch]`."""
        hidden, output = self.hidden, self.output
        plain = _plain_layers(hidden) if is_plain(hidden, HiddenLayers) else None
        if plain is None or not is_plain_column(output):
            return output(hidden(inputs)).squeeze(1)
        layers, dropouts = plain
        return relu_layers(inputs, layers, output, dropouts).squeeze(1)


class NumberEmbedding(nn.Module):
    """Gives number m its own vector v_m and the embedding `x_m * v_m` (AutoInt, eq. 4)."""

    def __init__(self, numbers: int, dim: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None
        if numbers:
            self.weight = nn.Parameter(glorot_normal_(torch.empty(numbers, dim), generator))

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """`[batch, fields + numbers, dim]` from `[batch, fields, dim]` and `[batch, numbers]`."""
        if self.weight is None:
            return embeddings
        return torch.cat([embeddings, dense.unsqueeze(2) * self.weight], 1)


def is_plain(module: nn.Module, kind: type) -> bool:
    """Whether a module is exactly of that class, unpatched and without hooks."""
    return type(module) is kind and not (
        "forward" in vars(module)
        or module._compiled_call_impl
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def is_plain_column(layer: nn.Module) -> bool:
    """Whether a layer only multiplies by one column of weights; see `is_plain`."""
    return is_plain(layer, nn.Linear) and layer.bias is None and layer.out_features == 1


def _plain_layers(
    hidden: HiddenLayers,
) -> tuple[list[nn.Linear], list[SampleDropout]] | None:
    """The layers and their dropouts, if any, where `relu_layers` can replace the module."""
    if not is_plain(hidden._mlp, nn.Sequential):
        return None
    layers, dropouts = [], []
    for layer in hidden._mlp:
        if not is_plain(layer, torchrec_mlp.Perceptron) or not is_plain(layer._linear, nn.Linear):
            return None
        layers.append(layer._linear)
        activation = layer._activation_fn
        if activation is not torch.relu:
            if not is_plain(activation, nn.Sequential) or len(activation) != 2:
                return None
            if not is_plain(activation[0], nn.ReLU) or not is_plain(activation[1], SampleDropout):
                return None
            dropouts.append(activation[1])
    if any(layer.bias is None for layer in layers):
        return None
    dropping = [dropout for dropout in dropouts if dropout.drops]
    if dropping and not (len(dropping) == len(layers) and dropping[0].has_keys):
        return None
    return layers, dropping


@torch.fx.wrap  # Symbolic tracing must not see the branches within.
def relu_layers(
    inputs: Tensor,
    layers: Sequence[nn.Linear],
    output: nn.Linear | None = None,
    dropouts: Sequence[SampleDropout] = (),
) -> Tensor:
    """`dropout(relu(x @ weight.T + bias))` of each layer, then `x @ weight.T` of the output, to one
    column.

    In training on a CPU it uses the C++ kernels and is differentiable once. Without gradients it
    uses plain torch, so that an exported model gives the same bits.
    """
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    column = None if output is None else output.weight
    dtype = None
    if torch.is_grad_enabled() and layers:
        dtype = cpu.computing_dtype(inputs, *parameters, column)
    # In this order: while a graph is captured, the shape must not be read.
    if dtype is None or inputs.dim() != 2 or not len(inputs):
        for number, layer in enumerate(layers):
            inputs = torch.relu(_aligned_linear(inputs, layer.weight, layer.bias))
            if dropouts:
                inputs = dropouts[number](inputs)
        return inputs if output is None else functional.linear(inputs, column)
    drawn = [(*dropout.draws.mask(), dropout.p) for dropout in dropouts]
    return _ReluLayers.apply(inputs, column, dtype, drawn, *parameters)


class _ReluLayers(torch.autograd.Function):
    """ReLU layers with dropout on a CPU, and a layer of one output after them."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        output: Tensor | None,
        dtype: torch.dtype,
        drawn: Sequence[tuple[Tensor, int, float]],
        *parameters: Tensor,
    ) -> Tensor:
        weights, biases = parameters[::2], parameters[1::2]
        inputs = inputs.to(dtype).contiguous()
        activations = [inputs, *cpu.relu_layers(inputs, weights, biases, drawn)]
        # What is above 0 after dropout was kept, and multiplied by this.
        ctx.scales = [1 / (1 - p) for _, _, p in drawn] or [1.0] * len(weights)
        ctx.save_for_backward(output, *weights, *activations)
        last = activations[-1]
        return last if output is None else _OPS.single_output(last, output.contiguous()).to(dtype)

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, *saved = ctx.saved_tensors
        layers = len(saved) // 2
        weights, activations = saved[:layers], saved[layers:]
        of_inputs_is_needed, of_output_is_needed, _, _, *are_needed = ctx.needs_input_grad
        # No layer below the lowest one needs a gradient.
        first = next((place for place, needed in enumerate(are_needed) if needed), 2 * layers)
        lowest = 0 if of_inputs_is_needed else first // 2
        # Gradients overwrite activations that are not needed again.
        in_place = not (
            torch._C._autograd._get_current_graph_task_keep_graph() or cpu.is_batch(grad)
        )
        of_output, last = None, activations[-1]
        if output is None:
            # The last activations belong to the caller.
            grad = grad.to(last.dtype).contiguous()
            grad, of_bias = _OPS.relu_backward(grad, last, False, ctx.scales[-1])
        else:
            if in_place:
                # Before the change, so that torch knows of it even if it fails.
                increment_version(last)
            grad, of_bias, of_output = _OPS.single_output_backward(
                grad.float().contiguous(), last, output.contiguous(), in_place, ctx.scales[-1]
            )
        below = activations[lowest:-1]
        if in_place:
            increment_version(below[1:])
        of_inputs, *found = cpu.relu_layers_backward(
            grad,
            of_bias,
            weights[lowest:],
            below,
            [1.0, *ctx.scales][lowest:-1],
            into_below=in_place,
            of_inputs=of_inputs_is_needed,
        )
        of_inputs = of_inputs if of_inputs_is_needed else None
        of_output = of_output if of_output_is_needed else None
        return of_inputs, of_output, None, None, *[None] * (2 * lowest), *found


def _aligned_linear(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`functional.linear`; on a GPU, rows are padded to 16 bytes, as NVIDIA recommends."""
    missing = -inputs.shape[-1] % _ALIGNED if _is_aligned_faster(inputs) else 0
    if missing:
        inputs, weight = (functional.pad(one, (0, missing)) for one in (inputs, weight))
    return functional.linear(inputs, weight, bias)


def _is_aligned_faster(inputs: Tensor) -> bool:
    return inputs.is_cuda
