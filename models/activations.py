# pyright: basic
"""Activations of hidden layers besides ReLU."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from stampede.models.mlp import HiddenLayers
from stampede.models.options import Activation


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
                ("activation", nn.PReLU(layer._linear.out_features))
                if isinstance(part, nn.ReLU)
                else (name, part)
                for name, part in parts
            )
        )
