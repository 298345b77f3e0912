"""Compiles the network with `torch.compile`, if `train.compile` asks for it."""

from __future__ import annotations

import torch
from torch import nn

from stampede.settings import SettingsError


def compile_network(network: nn.Module, how: str, device: torch.device) -> None:
    """Compile a network's forward and backward with `torch.compile` at its first call.

    Every batch size is compiled separately, up to 8: there are few (full and last batches of
    training and evaluation), and an epoch's last batch must not slow down the others.
    `cuda_graphs` also records each size's launches as one graph.
    """
    if how == "none":
        return
    if how == "cuda_graphs" and device.type != "cuda":
        raise SettingsError(
            "train.compile: found 'cuda_graphs', but this run is on the CPU; write "
            "train.compile=default or none"
        )
    network.compile(dynamic=False, mode="reduce-overhead" if how == "cuda_graphs" else None)
