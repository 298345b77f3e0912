"""C++ kernels of the dense layers on a CPU, compiled on first use.

Products use AMX tiles if the CPU has them, else torch. Activations and their gradients are float32
or bfloat16, contiguous `[rows, columns]`; weights and biases are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function

from stampede.native_library import Library

_FOLDER = Path(__file__).parent
_DENSE = Library(
    *(_FOLDER / name for name in ("attention.cpp", "dense.cpp", "products.cpp", "stored.cpp")),
    headers=[_FOLDER / name for name in ("lanes.h", "tiles.h")],
)

available = _DENSE.available


def computing_dtype(inputs: Tensor, *others: Tensor | None) -> torch.dtype | None:
    """The dtype that the kernels compute in: float32, or autocast's bfloat16.

    None if they cannot be used: not on a CPU, with other dtypes, while a graph is captured or
    operations are dispatched to Python, under torch.func, or if they do not compile. `others` are
    always float32.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return None
    dtype = torch.float32
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    fit = [(inputs, {torch.float32, dtype})]
    fit += [(other, {torch.float32}) for other in others if other is not None]
    if not all(
        type(one) in (Tensor, torch.nn.Parameter)
        and one.device.type == "cpu"
        and one.dtype in dtypes
        for one, dtypes in fit
    ):
        return None
    return dtype if dtype in (torch.float32, torch.bfloat16) and available() else None


def trains_in_float32(inputs: Tensor, *others: Tensor) -> bool:
    """Whether kernels that are float32 alone can be used, with autocast on `inputs.float()`.

    Without gradients torch is used, so that an exported model gives the same bits.
    """
    return torch.is_grad_enabled() and computing_dtype(inputs, *others) is not None


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


@cache
def has_tiles() -> bool:
    """Whether this CPU has AMX and the system allows it."""
    return torch.ops.stampede_dense.has_tiles()


def relu_layers(
    inputs: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    drawn: Sequence[tuple[Tensor, int, float]] = (),
) -> list[Tensor]:
    """The outputs of all layers, each `relu(x @ weight.T + bias)` of the one before.

    Args:
        drawn: keys, mask and p of each layer's dropout, see `dropout_`; empty for none.
    """
    if not has_tiles():
        keys = drawn[0][0].contiguous() if drawn else None
        masks, ps = [mask for _, mask, _ in drawn], [p for *_, p in drawn]
        thresholds, kept = map(dropout_threshold, ps), [1 / (1 - p) for p in ps]
        operator = torch.ops.stampede_dense.plain_layers
        return operator(inputs, weights, biases, keys, masks, list(thresholds), kept)
    weights, biases = ([one.contiguous() for one in ones] for ones in (weights, biases))
    if not drawn:
        return torch.ops.stampede_dense.relu_layers(inputs, weights, biases)
    found = []
    for weight, bias, dropout in zip(weights, biases, drawn, strict=True):
        (inputs,) = torch.ops.stampede_dense.relu_layers(inputs, [weight], [bias])
        found.append(dropout_(inputs, *dropout))
    return found


def is_batch(grad: Tensor) -> bool:
    """Whether this is one call for many gradients, which all read the same activations."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)


def relu_layers_backward(
    grad: Tensor,
    of_bias: Tensor,
    weights: Sequence[Tensor],
    below: Sequence[Tensor],
    scales: Sequence[float],
    *,
    into_below: bool,
    of_inputs: bool,
) -> list[Tensor]:
    """Gradients of the inputs, then of each layer's weight and bias; see `relu_layers`.

    Without `of_inputs`, the first is that of the lowest layer's product.

    Args:
        grad, of_bias: of the last layer's product and bias.
        below: the inputs of each layer.
        scales: what these were multiplied by after their ReLU; the first is not used.
        into_below: gradients overwrite the inputs of the layers, but for the first.
    """
    if not (has_tiles() or is_batch(grad)):
        operator = torch.ops.stampede_dense.plain_layers_backward
        return operator(grad, of_bias, weights, below, scales, into_below, of_inputs)
    found = []
    for layer in reversed(range(len(weights))):
        found = [transposed_product(grad, below[layer]), of_bias, *found]
        if layer:
            scale = scales[layer]
            grad, of_bias = masked_inputs_gradient(
                grad, weights[layer], below[layer], into_mask=into_below, scale=scale
            )
    return [inputs_gradient(grad, weights[0]) if of_inputs else grad, *found]


def dropout_threshold(p: float) -> int:
    """Of 32 bits; hashes below it are dropped."""
    return min(round(p * 2**32), 2**32 - 1)


def dropout_(values: Tensor, keys: Tensor, mask: int, p: float) -> Tensor:
    """Multiply by 0 with probability p, else by `1 / (1 - p)`, in place; see `models/dropout.py`.

    Args:
        values: contiguous, float32 or bfloat16, equally many for each of the int64 keys `[n]`.
    """
    operator = torch.ops.stampede_dense.dropout_
    operator(values, keys.contiguous(), mask, dropout_threshold(p), 1 / (1 - p))
    return values


def inputs_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """`grad @ weight`, in the gradient's dtype."""
    if has_tiles():
        return torch.ops.stampede_dense.inputs_gradient(grad, weight.contiguous())
    return grad @ weight.to(grad.dtype)


def masked_inputs_gradient(
    grad: Tensor, weight: Tensor, mask: Tensor, *, into_mask: bool = False, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`scale * grad @ weight` where the mask is above 0, else 0, and the float32 sums of columns.

    `into_mask`: the result overwrites the mask, which saves memory traffic.
    """
    if has_tiles():
        operator = torch.ops.stampede_dense.masked_inputs_gradient
        return operator(grad, weight.contiguous(), mask, into_mask, scale)
    operator = torch.ops.stampede_dense.relu_backward
    return operator(inputs_gradient(grad, weight), mask, into_mask, scale)


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """`a.T @ b`, `[columns of a, columns of b]`; float32 with tiles, else the factors' dtype."""
    return torch.ops.stampede_dense.transposed_product(a, b) if has_tiles() else a.t() @ b
