"""Passes over activations on a CPU in C++, compiled when they are first needed."""

from pathlib import Path

import torch

from stampede.native import Library

_DENSE = Library(Path(__file__).with_name("dense.cpp"))


def computing_dtype(inputs: torch.Tensor) -> torch.dtype | None:
    """In what the kernels compute with float32 inputs: float32, or what autocast says.

    None where they cannot: elsewhere than on a CPU, in other dtypes, while a graph is captured, and
    where they cannot be compiled.
    """
    dtype = inputs.dtype
    if inputs.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if torch.is_autocast_enabled("cpu") and dtype == torch.float32:
        dtype = torch.get_autocast_dtype("cpu")
    return dtype if dtype in (torch.float32, torch.bfloat16) and _DENSE.available() else None


__all__ = ["computing_dtype"]
