# pyright: basic
"""Activations of hidden layers besides ReLU."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from stampede.models.mlp import HiddenLayers
from stampede.models.options import Activation


class Dice(nn.Module):
    """`p * x + (1 - p) * alpha * x` with `p = sigmoid((x - mean) / sqrt(variance + eps))`.

    Of DIN (arXiv 1706.06978, eq. 3), whose eps it has. Mean and variance of each column are over
    all rows of the global batch: samples, or in a unit of attention the ids of their histories.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """`[n, width]` from `[n, width]`."""
        share = torch.sigmoid(self.norm(x))
        return x * torch.lerp(self.alpha.to(share.dtype), torch.ones_like(share), share)


_KINDS = {"prelu": nn.PReLU, "dice": Dice}


def activate(hidden: HiddenLayers, activation: Activation) -> None:
    """Replace the ReLU of layers, which keep their normalization and dropout."""
    if activation == "relu":
        return
    layers: Any = hidden._mlp
    for layer in layers:
        found = layer._activation_fn
        parts = found.named_children() if isinstance(found, nn.Sequential) else [("", nn.ReLU())]
        # Of one name, whether the layer has a norm and dropout or not.
        layer._activation_fn = nn.Sequential(
            OrderedDict(
                ("activation", _KINDS[activation](layer._linear.out_features))
                if isinstance(part, nn.ReLU)
                else (name, part)
                for name, part in parts
            )
        )
