"""C++ kernels of the dense layers on a CPU, compiled on first use.

Products use AMX tiles if the CPU has them, else torch. Activations and their gradients are float32
or bfloat16, contiguous `[rows, columns]`; weights and biases are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function
from torch.nn import functional

from stampede.native_library import Library

_FOLDER = Path(__file__).parent
_DENSE = Library(
    *(_FOLDER / name for name in ("dense.cpp", "products.cpp", "stored.cpp")),
    headers=[_FOLDER / name for name in ("lanes.h", "tiles.h")],
)

available = _DENSE.available


def computing_dtype(inputs: Tensor) -> torch.dtype | None:
    """The dtype that the kernels compute in: float32, or autocast's bfloat16.

    None if they cannot be used: not on a CPU, with other dtypes, while a graph is captured or
    operations are dispatched to Python, under torch.func, or if they do not compile.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return None
    if type(inputs) not in (Tensor, torch.nn.Parameter) or inputs.device.type != "cpu":
        return None
    dtype = torch.float32
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    if inputs.dtype not in (torch.float32, dtype):
        return None
    return dtype if dtype in (torch.float32, torch.bfloat16) and available() else None


def no_double_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the backward of an autograd function raise an error with `create_graph`.

    torch's own decorator does so only if the incoming gradient requires a gradient; otherwise the
    result has no graph, and a gradient penalty would silently be a constant.
    """
    once = function.once_differentiable(backward)

    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of these layers cannot be differentiated again, but "
                "create_graph=True was requested"
            )
        return once(ctx, *grads)

    return checked


def has_tiles() -> bool:
    """Whether this CPU has AMX and the system allows it."""
    return torch.ops.stampede_dense.has_tiles()


def relu_layers(
    inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> list[Tensor]:
    """The outputs of all layers, each `relu(x @ weight.T + bias)` of the previous one.

    Each is `[rows, outputs]`, in the inputs' dtype.
    """
    if has_tiles():
        operator = torch.ops.stampede_dense.relu_layers
        return operator(
            inputs, [one.contiguous() for one in weights], [one.contiguous() for one in biases]
        )
    found = []
    for weight, bias in zip(weights, biases, strict=True):
        inputs = _relu_layer(inputs, weight, bias)
        found.append(inputs)
    return found


def _relu_layer(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    dtype = inputs.dtype
    output = functional.linear(inputs, weight.to(dtype), bias.to(dtype))
    # oneDNN's fused ReLU would silently turn NaN into 0.
    if dtype == torch.float32:
        return output.relu_()
    torch.ops.stampede_dense.relu_(output)
    return output


def relu_backward(grad: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a ReLU's input, and the sums of its columns."""
    return torch.ops.stampede_dense.relu_backward(grad, output, False)


def single_output(inputs: Tensor, weight: Tensor) -> Tensor:
    """`inputs @ weight.T`, `[rows, 1]` float32, of a weight `[1, columns]`."""
    return torch.ops.stampede_dense.single_output(inputs, weight.contiguous())


def single_output_backward(
    grad: Tensor, inputs: Tensor, weight: Tensor, *, into_inputs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient before the ReLUs of the inputs, its column sums, and the weight's gradient.

    Args:
        grad: `[rows, 1]` float32.
        into_inputs: whether the first overwrites the inputs.
    """
    operator = torch.ops.stampede_dense.single_output_backward
    return operator(grad, inputs, weight.contiguous(), into_inputs)


def inputs_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """`grad @ weight`, in the gradient's dtype."""
    if has_tiles():
        return torch.ops.stampede_dense.inputs_gradient(grad, weight.contiguous())
    return grad @ weight.to(grad.dtype)


def masked_inputs_gradient(
    grad: Tensor, weight: Tensor, mask: Tensor, *, into_mask: bool = False
) -> tuple[Tensor, Tensor]:
    """`grad @ weight` where the mask is above 0, else 0; and the float32 sums of its columns.

    Args:
        mask: of the result's shape and the gradient's dtype.
        into_mask: whether the result overwrites the mask, which saves memory traffic.
    """
    if has_tiles():
        operator = torch.ops.stampede_dense.masked_inputs_gradient
        return operator(grad, weight.contiguous(), mask, into_mask)
    return torch.ops.stampede_dense.relu_backward(inputs_gradient(grad, weight), mask, into_mask)


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """`a.T @ b`, `[columns of a, columns of b]`; float32 with tiles, else the factors' dtype."""
    return torch.ops.stampede_dense.transposed_product(a, b) if has_tiles() else a.t() @ b
