"""Computes the dense part of a model, a list of torch operators in `dense.json`.

Nothing is unpickled, imported or evaluated: an operator is one of `OPERATORS` or `ARITHMETIC`, and
its arguments are numbers, text, types, weights and results of earlier steps.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Torch operators that compute tensors from tensors and check their arguments. None reads a file,
# runs code or trusts an index. A trailing underscore means in place.
_NAMES = """
abs add addcdiv addcmul addmm alias all amax amin any arange argmax argmin atan avg_pool1d baddbmm
batch_norm bmm broadcast_to cat celu chunk clamp clamp_max clamp_min clone concat constant_pad_nd
contiguous conv1d copy cos cosine_similarity cumprod cumsum detach diag_embed diagonal div dot
dropout einsum elu eq erf exp expand expand_as expm1 eye flatten flip floor floor_divide full
full_like gather ge gelu glu group_norm gt hardsigmoid hardswish hardtanh hstack index
index_select instance_norm isfinite isinf isnan layer_norm le leaky_relu lerp lift_fresh_copy
linalg_norm linalg_vector_norm linear log log10 log1p log2 log_sigmoid log_softmax logical_and
logical_not logical_or logical_xor logit logsumexp lt masked_fill matmul max maximum mean min
minimum mish mm movedim mT mul mv nan_to_num narrow ne neg new_full new_ones new_zeros norm numpy_T
one_hot ones ones_like outer pad permute pow prelu prod reciprocal relu relu6 remainder repeat
repeat_interleave reshape rms_norm roll round rsqrt rsub scalar_tensor
scaled_dot_product_attention scatter scatter_add segment_reduce select selu sigmoid sign silu sin
slice softmax softplus split split_with_sizes sqrt square squeeze stack std sub sum sym_size t tan
tanh tensor_split tensordot tile to topk transpose tril tril_indices triu triu_indices type_as
unbind unflatten unfold unsqueeze var view view_as vstack where zeros zeros_like
"""

OPERATORS = frozenset(_NAMES.split())
_DIVIDING = ("floor_divide", "remainder")

# Python operators on sizes.
ARITHMETIC = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg")
}

_TYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "strided", "contiguous_format", "preserve_format",
)  # fmt: skip


class _Step(NamedTuple):
    """An operator; in its arguments, `{"value": NAME}` is an input or an earlier step's result."""

    name: str
    operator: Callable[..., Any]
    arguments: list[Any]
    named: dict[str, Any]


class Dense:
    """Computes logits `[n]` of rows `[n, fields, dim + 1]`, numbers `[n, numbers]` and histories.

    If fields differ in width, their rows are side by side, `[n, columns]`.

    Args:
        graph: what `dense.json` holds: `steps`, each with a `name`, an `operator`, `arguments` and
            optionally `named` arguments; the name of the `output`; names of the `trained` weights.
        weights: named tensors.
        device: for the weights.

    Raises:
        ValueError: the graph has an operator or an argument that packages do not support.
    """

    def __init__(
        self, graph: Mapping[str, Any], weights: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self._device = device
        # Copy: a mapped file may not be aligned for torch. Keep requires_grad: torch chooses
        # kernels by it, and kernels round differently.
        self._weights = {
            name: weight.to(device, copy=True).requires_grad_(name in graph["trained"])
            for name, weight in weights.items()
        }
        self._output = graph["output"]
        self._steps: list[_Step] = []
        # The last step that needs each value, after which its memory is free.
        self._last_use: dict[str, str] = {}
        for step in graph["steps"]:
            name = step["name"]
            self._last_use[name] = name
            found = find_operator(step["operator"])
            arguments = self._decoded(step["arguments"], name)
            named = {key: self._decoded(one, name) for key, one in step.get("named", {}).items()}
            self._steps.append(_Step(name, found, arguments, named))
        self._last_use[self._output] = ""

    def __call__(
        self, rows: Tensor, numbers: Tensor, histories: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> Tensor:
        """Logits of samples.

        Args:
            histories: of each field `[ids, dim + 1]`, and the number of ids of each sample; of
                padded ones `[n, most, dim + 1]`, and which places hold ids.
        """
        values: dict[str, Any] = {"rows": rows, "numbers": numbers}
        for number, (of_ids, places) in enumerate(histories):
            values |= {f"values_{number}": of_ids, f"places_{number}": places}
        for step in self._steps:
            named = {key: _filled(one, values) for key, one in step.named.items()}
            values[step.name] = step.operator(*_filled(step.arguments, values), **named)
            for name in [name for name in values if self._last_use.get(name) == step.name]:
                del values[name]
        return values[self._output]

    def _decoded(self, given: Any, step: str) -> Any:
        """An argument of a step that `argument` described."""
        if isinstance(given, list):
            return [self._decoded(one, step) for one in given]
        if not isinstance(given, dict):
            return given
        ((kind, name),) = given.items()
        if kind == "value":
            self._last_use[name] = step
            return given
        if kind == "weight" and name in self._weights:
            return self._weights[name]
        if kind == "type" and name in _TYPES:
            return getattr(torch, name)
        if kind == "float" and name in ("inf", "-inf", "nan"):
            return float(name)
        if given == {"device": "model"}:
            return self._device
        raise ValueError(f"packages do not support the argument {given}")


def find_operator(name: str) -> Callable[..., Any]:
    """An operator by its name: `linear.default` of torch, `mul` of Python.

    Raises:
        ValueError: packages do not support it.
    """
    packet, is_of_torch, overload = name.partition(".")
    if name == "getitem":
        return operator.getitem
    if name in ARITHMETIC:
        return ARITHMETIC[name]
    if is_of_torch and packet.removesuffix("_") in OPERATORS:
        overloads = getattr(torch.ops.aten, packet, None)
        if overloads is not None and overload in overloads.overloads():
            found = getattr(overloads, overload)
            if not any(one.is_out for one in found._schema.arguments):
                if packet == "segment_reduce":
                    return partial(_sums_of_segments, found)
                is_whole = packet.strip("_") in _DIVIDING or overload.endswith("mode")
                return partial(_divided, found) if is_whole else found
    raise ValueError(f"packages do not support the operator {name!r}")


def _divided(divide: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
    """A quotient or remainder; the smallest whole number by -1 would end the process."""
    if not any(isinstance(one, float) or _is_of_floats(one) for one in arguments):
        raise ValueError("packages do not divide whole numbers")
    return divide(*arguments, **named)


def _sums_of_segments(
    reduce: Callable[..., Tensor], values: Tensor, how: str, *, lengths: Tensor, initial: float
) -> Tensor:
    """Of `values`, whose number torch compares with the lengths; it does not check offsets."""
    return reduce(values, how, lengths=lengths, initial=initial)


def _is_of_floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def argument(given: Any) -> Any:
    """An argument as JSON; the caller describes values and weights.

    Raises:
        ValueError: packages do not support it.
    """
    if given is None or isinstance(given, bool | int | str):
        return given
    if isinstance(given, float):
        return given if math.isfinite(given) else {"float": str(given)}
    if isinstance(given, torch.device):
        return {"device": "model"}
    name = str(given).removeprefix("torch.")
    if name in _TYPES and given is getattr(torch, name):
        return {"type": name}
    raise ValueError(f"packages do not support the argument {given!r}")


def _filled(given: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(given, dict):
        return values[given["value"]]
    return [_filled(one, values) for one in given] if isinstance(given, list) else given
