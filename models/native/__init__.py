"""Passes over activations on a CPU in C++, compiled when they are first needed."""

from pathlib import Path

import torch

from stampede.native import Library

_DENSE = Library(
    *(Path(__file__).with_name(name) for name in ("dense.cpp", "transposed_product.cpp"))
)


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


def transposed_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a.t() @ b` of float32 or bfloat16 matrices on a CPU where the kernels can be used.

    Float32 where AMX multiplies bfloat16, and else of the factors' dtype.

    Args:
        a, b: `[rows, columns]`.
    """
    if a.dtype == torch.bfloat16 and torch.ops.stampede_dense.can_multiply_transposed():
        return torch.ops.stampede_dense.transposed_product(a.contiguous(), b.contiguous())
    return a.t() @ b


__all__ = ["available", "computing_dtype", "transposed_product"]
