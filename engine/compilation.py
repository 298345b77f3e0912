"""Whether the network is compiled, and how."""

from __future__ import annotations

import sys
from typing import Literal

import torch
from torch import nn

from stampede.settings import SettingsError

Compilation = Literal["none", "default", "cuda_graphs"]


def compile_network(network: nn.Module, how: Compilation, device: torch.device) -> None:
    """Have `torch.compile` take over a network's forward and backward, from its first call on.

    Names of parameters stay what they are. Every size of a batch is compiled on its own: there are
    few (training and evaluation have a whole one and a last one each), and the last one of an epoch
    must not make the others slower. After 8 sizes torch compiles no more.

    Args:
        how: `cuda_graphs` also records what is launched for each size, and launches it as one.

    Raises:
        SettingsError: CUDA graphs are asked for elsewhere than on a GPU.
    """
    if how == "none":
        return
    if how == "cuda_graphs" and device.type != "cuda":
        raise SettingsError(
            "train.compile: found 'cuda_graphs', but this run is on the CPU; write "
            "train.compile=default or none"
        )
    network.compile(dynamic=False, mode="reduce-overhead" if how == "cuda_graphs" else None)


def could_not_compile(failure: Exception) -> bool:
    """Whether `torch.compile` failed, for want of a compiler or by a fault of its own."""
    # Only where it was imported, which takes long.
    compilers = sys.modules.get("torch._dynamo.exc")
    return compilers is not None and isinstance(failure, compilers.BackendCompilerFailed)
