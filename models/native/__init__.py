"""Products and passes over activations on a CPU in C++, compiled when they are first needed."""

from pathlib import Path

import torch

from stampede.models.native.products import (
    has_tiles,
    inputs_gradient,
    masked_inputs_gradient,
    relu_backward,
    relu_layers,
    single_output,
    single_output_backward,
    transposed_product,
)
from stampede.native_library import Library

_FOLDER = Path(__file__).parent
_DENSE = Library(
    *(_FOLDER / name for name in ("dense.cpp", "products.cpp", "stored.cpp")),
    headers=[_FOLDER / name for name in ("lanes.h", "matrices.h", "tiles.h", "writing.h")],
)


available = _DENSE.available


def computing_dtype(inputs: torch.Tensor) -> torch.dtype | None:
    """In what the kernels compute with float32 inputs: float32, or what autocast says.

    None where they cannot: elsewhere than on a CPU, in other dtypes, while a graph is captured or
    operations are watched, under torch.func, and where they cannot be compiled.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return None
    if type(inputs) not in (torch.Tensor, torch.nn.Parameter) or inputs.device.type != "cpu":
        return None
    dtype = torch.float32
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    if inputs.dtype not in (torch.float32, dtype):
        return None
    return dtype if dtype in (torch.float32, torch.bfloat16) and available() else None


__all__ = [
    "available",
    "computing_dtype",
    "has_tiles",
    "inputs_gradient",
    "masked_inputs_gradient",
    "relu_backward",
    "relu_layers",
    "single_output",
    "single_output_backward",
    "transposed_product",
]
