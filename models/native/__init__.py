"""Products and passes over activations on a CPU in C++, compiled when they are first needed."""

from pathlib import Path

import torch

from stampede.models.native.products import (
    has_tiles,
    inputs_gradient,
    masked_inputs_gradient,
    relu_layer,
    transposed_product,
)
from stampede.native import Library

_FOLDER = Path(__file__).parent
_DENSE = Library(_FOLDER / "dense.cpp", _FOLDER / "products.cpp", headers=[_FOLDER / "tiles.h"])


available = _DENSE.available


def computing_dtype(inputs: torch.Tensor) -> torch.dtype | None:
    """In what the kernels compute with float32 inputs: float32, or what autocast says.

    None where they cannot: elsewhere than on a CPU, in other dtypes, while a graph is captured,
    under torch.func, and where they cannot be compiled.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if torch._C._are_functorch_transforms_active() or inputs.device.type != "cpu":
        return None
    dtype = inputs.dtype
    if torch.is_autocast_enabled("cpu") and dtype == torch.float32:
        dtype = torch.get_autocast_dtype("cpu")
    return dtype if dtype in (torch.float32, torch.bfloat16) and available() else None


__all__ = [
    "available",
    "computing_dtype",
    "has_tiles",
    "inputs_gradient",
    "masked_inputs_gradient",
    "relu_layer",
    "transposed_product",
]
