"""A stack of dense layers, initialised as the reference's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def glorot_normal_(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Keras' Glorot normal, in place: normal with `std = sqrt(2 / (fan_in + fan_out))`, cut off
    at two standard deviations and widened so that the cut does not shrink the variance.
    """
    fan_out, fan_in = weight.shape
    # Standard deviation of a unit normal cut off at +-2 (Keras' VarianceScaling).
    std = math.sqrt(2.0 / (fan_in + fan_out)) / 0.87962566103423978
    return nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std, generator=generator)


class MLP(nn.Sequential):
    """ReLU layers, then one output without bias and activation.

    Args:
        inputs: width of the input.
        hidden: widths of the hidden layers.
        generator: source of the initial weights.

    Maps `[batch, inputs]` to `[batch]`.
    """

    def __init__(self, inputs: int, hidden: Sequence[int], generator: torch.Generator) -> None:
        widths = [inputs, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
            nn.init.zeros_(layers[-2].bias)
        layers += [nn.Linear(widths[-1], 1, bias=False), nn.Flatten(0)]
        super().__init__(*layers)
        for layer in self:
            if isinstance(layer, nn.Linear):
                glorot_normal_(layer.weight, generator)
