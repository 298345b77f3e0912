# pyright: basic
"""Activations of hidden layers besides ReLU."""

from __future__ import annotations

from torch import nn

from stampede.models.mlp import HiddenLayers
from stampede.models.options import Activation


def activate(hidden: HiddenLayers, activation: Activation) -> None:
    """Replace the ReLU of layers, which keep their normalization and dropout."""
    if activation == "relu":
        return
    for layer in hidden._mlp:
        other = nn.PReLU(layer._linear.out_features)
        found = layer._activation_fn
        if isinstance(found, nn.Sequential):
            parts = [other if isinstance(one, nn.ReLU) else one for one in found]
            layer._activation_fn = nn.Sequential(*parts)
        else:
            layer._activation_fn = other
