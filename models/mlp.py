"""Stacks of dense layers, initialised as the reference's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.fx
from torch import Tensor, nn
from torchrec.modules import mlp as torchrec_mlp

from stampede.models.registry import Normalization
from stampede.models.relu_layers import relu_layers

# Who traces a network symbolically is not to see the branches within.
torch.fx.wrap("relu_layers")


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
    """A layer with Glorot-normal weights and, where it has one, a bias of zeros."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    return initialize_(layer, generator)


def initialize_(layers: nn.Module, generator: torch.Generator) -> nn.Module:
    """Glorot-normal weights and biases of zeros for all `nn.Linear` within, in place."""
    for layer in layers.modules():
        if isinstance(layer, nn.Linear):
            glorot_normal_(layer.weight, generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return layers


class HiddenLayers(torchrec_mlp.MLP):
    """TorchRec's MLP of ReLU layers, with our kernels on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., widths[-1]]` from `[..., inputs]`."""
        layers = _plain_layers(self)
        return super().forward(input) if layers is None else relu_layers(input, layers)


def _plain_layers(hidden: HiddenLayers) -> list[nn.Linear] | None:
    """What relu_layers computes as the module does; None if it may do something else."""
    if not is_plain(hidden._mlp, nn.Sequential):
        return None
    are_plain = all(
        is_plain(layer, torchrec_mlp.Perceptron)
        and layer._activation_fn is torch.relu
        and is_plain(layer._linear, nn.Linear)
        and layer._linear.bias is not None
        for layer in hidden._mlp
    )
    return [layer._linear for layer in hidden._mlp] if are_plain else None


def is_plain(module: nn.Module, kind: type) -> bool:
    """Whether it is of that very kind, unchanged, and nobody waits for it to be called."""
    return type(module) is kind and not (
        "forward" in vars(module)
        or module._compiled_call_impl
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def hidden_layers(
    inputs: int,
    widths: Sequence[int],
    generator: torch.Generator,
    dropout: float = 0.0,
    normalization: Normalization = "none",
) -> HiddenLayers:
    """ReLU layers: `[batch, inputs]` to `[batch, widths[-1]]`.

    With layer norm or dropout, see `NetworkShape`, plain torch computes
    `dropout(relu(layer_norm(x @ weight.T + bias)))` of each layer.
    """
    hidden = HiddenLayers(inputs, list(widths))
    if dropout or normalization != "none":
        for layer, width in zip(hidden._mlp, widths, strict=True):
            norm = [nn.LayerNorm(width)] if normalization == "layer" else []
            # In place of the activation, so that the names of weights stay what they are.
            layer._activation_fn = nn.Sequential(*norm, nn.ReLU(), nn.Dropout(dropout))
    return initialize_(hidden, generator)


class MLP(nn.Module):
    """ReLU layers, then one output without bias and activation.

    Args:
        inputs: width of the input.
        hidden: widths of the hidden layers.
        generator: source of the initial weights.
        dropout, normalization: of the hidden layers, see `NetworkShape`.

    Maps `[batch, inputs]` to `[batch]`.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        generator: torch.Generator,
        dropout: float = 0.0,
        normalization: Normalization = "none",
    ) -> None:
        super().__init__()
        self.hidden = hidden_layers(inputs, hidden, generator, dropout, normalization)
        self.output = linear(hidden[-1], 1, generator, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits `[batch]`."""
        hidden, output = self.hidden, self.output
        layers = _plain_layers(hidden) if is_plain(hidden, HiddenLayers) else None
        if layers is None or not is_plain(output, nn.Linear) or not is_one_column(output):
            return output(hidden(inputs)).squeeze(1)
        return relu_layers(inputs, layers, output).squeeze(1)


def is_one_column(output: nn.Linear) -> bool:
    """Whether all it does is a product with one column of weights."""
    return output.bias is None and output.out_features == 1
