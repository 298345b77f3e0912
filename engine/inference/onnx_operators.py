"""Translates the dense part of a model from torch operators to ONNX nodes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from stampede.engine.errors import RunFolderError
from stampede.engine.inference.onnx_graph import Graph
from stampede.engine.inference.packaging import program_weights

_NUMPY = {
    torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16,
    torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16, torch.int8: np.int8,
    torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip


class _UnknownError(Exception):
    """An operator without a translation; the text may name its arguments."""


def add_program(graph: Graph, program: ExportedProgram, inputs: Sequence[str]) -> str:
    """Add a program's nodes to a graph.

    Args:
        program: see `export_dense_part`.
        inputs: names of the values of its inputs.

    Returns:
        The name of its result.

    Raises:
        RunFolderError: an operator has no translation; the message names it.
    """
    program = program.run_decompositions()
    return _Translation(graph, program, inputs).result()


class _Translation:
    """Values of a program's nodes: names, or lists of names."""

    def __init__(self, graph: Graph, program: ExportedProgram, inputs: Sequence[str]) -> None:
        self.graph = graph
        self._values: dict[Node, Any] = {}
        self._nodes = {node.name: node for node in program.graph.nodes}
        (self._output,) = program.graph_signature.user_outputs
        self._weights, self._known = program_weights(program)
        for name, value in zip(program.graph_signature.user_inputs, inputs, strict=True):
            self._values[self._nodes[name]] = value

    def result(self) -> str:
        """Write the nodes that the output needs; return its name."""
        output = self._nodes[self._output]
        needed = {output}
        for node in reversed(self._nodes.values()):
            if node in needed:
                needed.update(node.all_input_nodes)
        for node in self._nodes.values():
            if node in needed and node not in self._values:
                try:
                    self._values[node] = self._written(node)
                except _UnknownError as failure:
                    raise RunFolderError(
                        f"the network cannot be written as ONNX: {node.target}{failure} has no "
                        "translation here; use other torch functions in its forward, or leave "
                        "out --format onnx"
                    ) from None
        return self.value(output, torch.float32)

    def _written(self, node: Node) -> Any:
        if node.op == "placeholder":
            weight = self._weights[self._known[node.name]["weight"]]
            return self.graph.constant(weight.detach().numpy())
        if node.target is operator.getitem:
            return self._values[node.args[0]][node.args[1]]
        if node.target in _ON_SIZES:
            sizes = [self.value(one, torch.int64) for one in node.args]
            return self.graph.add(_ON_SIZES[node.target], *sizes)
        schema = getattr(node.target, "_schema", None)
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        if schema is None or name not in _OPERATORS:
            raise _UnknownError
        names = [one.name for one in schema.arguments]
        defaults = {one.name: one.default_value for one in schema.arguments}
        given = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        return _OPERATORS[name](_Call(self, given, node.meta["val"]))

    def value(self, given: Any, kind: torch.dtype | None = None) -> str:
        """The name of an argument's value, cast to a torch type unless None."""
        if not isinstance(given, Node):
            return self.graph.constant(given, _numpy(kind))
        value = self._values[given]
        return value if kind in (None, _type_of(given)) else self.graph.cast(value, _numpy(kind))


@dataclass(frozen=True)
class _Call:
    """An operator of torch with its arguments.

    Attributes:
        translation: the translation that it belongs to.
        given: arguments by name, defaults included.
        result: as `torch.export` traced it: type and shape.
    """

    translation: _Translation
    given: dict[str, Any]
    result: Any

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; return the name of its result."""
        return self.translation.graph.add(kind, *inputs, **attributes)

    def value(self, argument: str) -> str:
        """An argument's value, not cast."""
        return self.translation.value(self.given[argument])

    def like(self, given: Any) -> str:
        """A value, or a named argument, cast to the type of the result."""
        given = self.given[given] if isinstance(given, str) else given
        return self.translation.value(given, self.result.dtype)

    def sizes(self, given: Iterable[Any]) -> str:
        """Whole numbers, some of them perhaps computed, as `[n]` int64."""
        graph, given = self.translation.graph, list(given)
        if not any(isinstance(one, Node) for one in given):
            return graph.constant(given, np.int64)
        one = graph.constant([1], np.int64)
        sizes = [self.translation.value(size, torch.int64) for size in given]
        return self.add("Concat", *(self.add("Reshape", size, one) for size in sizes), axis=0)

    def shape(self, argument: str) -> Sequence[Any]:
        """Sizes of an argument; variable ones are symbols."""
        return self.given[argument].meta["val"].shape


def _type_of(given: Node) -> torch.dtype:
    found = given.meta["val"]
    return found.dtype if isinstance(found, Tensor) else torch.int64


def _numpy(kind: torch.dtype | None) -> type[np.generic]:
    if kind not in _NUMPY:
        raise _UnknownError(f" of {kind}")
    return _NUMPY[kind]


# Python operators on sizes.
_ON_SIZES = {
    operator.add: "Add", operator.sub: "Sub", operator.mul: "Mul", operator.floordiv: "Div",
}  # fmt: skip

# Operators on one tensor.
_UNARY = {
    "abs": "Abs", "atan": "Atan", "bitwise_not": "Not", "ceil": "Ceil", "cos": "Cos",
    "erf": "Erf", "exp": "Exp", "floor": "Floor", "log": "Log", "logical_not": "Not",
    "neg": "Neg", "reciprocal": "Reciprocal", "relu": "Relu", "round": "Round",
    "sigmoid": "Sigmoid", "sign": "Sign", "sin": "Sin", "sqrt": "Sqrt", "tan": "Tan",
    "tanh": "Tanh",
}  # fmt: skip

# Operators on two tensors, or a tensor and a number, in the type of the result.
_BINARY = {
    "add": "Add", "bitwise_and": "And", "bitwise_or": "Or", "bitwise_xor": "Xor", "div": "Div",
    "logical_and": "And", "logical_or": "Or", "logical_xor": "Xor",
    "maximum": "Max", "minimum": "Min", "mul": "Mul", "pow": "Pow", "sub": "Sub",
}  # fmt: skip

_COMPARISONS = {
    "eq": "Equal", "ge": "GreaterOrEqual", "gt": "Greater", "le": "LessOrEqual", "lt": "Less",
    "ne": "Equal",
}  # fmt: skip

_REDUCTIONS = {
    "amax": "ReduceMax", "amin": "ReduceMin", "linalg_vector_norm": "ReduceL2",
    "mean": "ReduceMean", "prod": "ReduceProd", "sum": "ReduceSum",
}  # fmt: skip


def _unary(kind: str) -> Callable[[_Call], str]:
    def write(call: _Call) -> str:
        _check_bits(call, kind)
        return call.add(kind, call.like("self"))

    return write


def _check_bits(call: _Call, kind: str) -> None:
    """ONNX has these only for booleans."""
    if kind in ("Not", "And", "Or", "Xor") and call.result.dtype != torch.bool:
        raise _UnknownError(f" of {call.result.dtype}")


def _binary(kind: str) -> Callable[[_Call], str]:
    def write(call: _Call) -> str:
        if call.given.get("rounding_mode") is not None:
            raise _UnknownError(f" with rounding_mode={call['rounding_mode']!r}")
        _check_bits(call, kind)
        one, other = (call.like(value) for value in list(call.given.values())[:2])
        if call.given.get("alpha", 1) != 1:
            other = call.add("Mul", other, call.like("alpha"))
        return call.add(kind, one, other)

    return write


def _comparison(kind: str, negated: bool) -> Callable[[_Call], str]:
    def write(call: _Call) -> str:
        both = list(call.given.values())
        common = torch.result_type(*(x.meta["val"] if isinstance(x, Node) else x for x in both))
        found = call.add(kind, *(call.translation.value(x, common) for x in both))
        return call.add("Not", found) if negated else found

    return write


def _reduction(kind: str) -> Callable[[_Call], str]:
    def write(call: _Call) -> str:
        if call.given.get("ord", 2) != 2:
            raise _UnknownError(f" with ord={call['ord']}")
        return _reduced(call, kind, call.like("self"))

    return write


def _reduced(call: _Call, kind: str, value: str) -> str:
    dims = call.given.get("dim")
    axes = [call.sizes([dims] if isinstance(dims, int) else dims)] if dims not in (None, []) else []
    return call.add(kind, value, *axes, keepdims=int(call.given.get("keepdim", False)))


_OPERATORS: dict[str, Callable[[_Call], Any]] = {
    **{name: _unary(kind) for name, kind in _UNARY.items()},
    **{name: _binary(kind) for name, kind in _BINARY.items()},
    **{name: _comparison(kind, name == "ne") for name, kind in _COMPARISONS.items()},
    **{name: _reduction(kind) for name, kind in _REDUCTIONS.items()},
    **dict.fromkeys(
        ("alias", "clone", "contiguous", "detach", "lift_fresh_copy", "_to_copy"),
        lambda call: call.like("self"),
    ),
    "scalar_tensor": lambda call: call.like("s"),
    "rsqrt": lambda call: call.add("Reciprocal", call.add("Sqrt", call.like("self"))),
    "log1p": lambda call: call.add("Log", call.add("Add", call.like("self"), call.like(1))),
    "expm1": lambda call: call.add("Sub", call.add("Exp", call.like("self")), call.like(1)),
    "where": lambda call: call.add(
        "Where", call.value("condition"), call.like("self"), call.like("other")
    ),
    "leaky_relu": lambda call: call.add(
        "LeakyRelu", call.value("self"), alpha=call["negative_slope"]
    ),
    "_softmax": lambda call: call.add("Softmax", call.value("self"), axis=call["dim"]),
    "_log_softmax": lambda call: call.add("LogSoftmax", call.value("self"), axis=call["dim"]),
    **dict.fromkeys(
        ("mm", "bmm"), lambda call: call.add("MatMul", call.value("self"), call.value("mat2"))
    ),
    "addmm": lambda call: call.add(
        "Gemm",
        *map(call.value, ("mat1", "mat2", "self")),
        alpha=float(call["alpha"]),
        beta=float(call["beta"]),
    ),
    # 1 keeps the input's size in ONNX, as -1 does in torch.
    "expand": lambda call: call.add(
        "Expand",
        call.value("self"),
        call.sizes(1 if isinstance(x, int) and x == -1 else x for x in call["size"]),
    ),
    "permute": lambda call: call.add(
        "Transpose", call.value("self"), perm=[dim % call.result.ndim for dim in call["dims"]]
    ),
    "unsqueeze": lambda call: call.add("Unsqueeze", call.value("self"), call.sizes([call["dim"]])),
    "select": lambda call: call.add(
        "Gather",
        call.value("self"),
        call.translation.value(call["index"], torch.int64),
        axis=call["dim"],
    ),
    "index_select": lambda call: call.add(
        "Gather", call.value("self"), call.value("index"), axis=call["dim"]
    ),
    "gather": lambda call: call.add(
        "GatherElements", call.value("self"), call.value("index"), axis=call["dim"]
    ),
    "embedding": lambda call: call.add("Gather", call.value("weight"), call.value("indices")),
    "cat": lambda call: call.add("Concat", *map(call.like, call["tensors"]), axis=call["dim"]),
    "full": lambda call: call.add("Expand", call.like("fill_value"), call.sizes(call["size"])),
    "full_like": lambda call: call.add(
        "Expand", call.like("fill_value"), call.add("Shape", call.value("self"))
    ),
    "arange": lambda call: call.add("Range", *map(call.like, ("start", "end", "step"))),
}


def _writes(*names: str) -> Callable[[Callable[[_Call], Any]], Callable[[_Call], Any]]:
    """Register a function that writes a torch operator."""

    def register(write: Callable[[_Call], Any]) -> Callable[[_Call], Any]:
        _OPERATORS.update(dict.fromkeys(names, write))
        return write

    return register


@_writes("any")
def _any(call: _Call) -> str:
    graph = call.translation.graph
    return graph.cast(
        _reduced(call, "ReduceMax", graph.cast(call.value("self"), np.int32)), np.bool_
    )


@_writes("var")
def _var(call: _Call) -> str:
    shape, value = call.shape("self"), call.like("self")
    dims = range(len(shape)) if call["dim"] is None else call["dim"]
    count = math.prod(shape[dim] for dim in dims)
    if not isinstance(count, int):
        raise _UnknownError(" over samples")
    correction = 1 if call["correction"] is None else call["correction"]
    mean = call.add("ReduceMean", value, call.sizes(dims), keepdims=1)
    squares = _reduced(call, "ReduceSumSquare", call.add("Sub", value, mean))
    return call.add("Div", squares, call.like(count - correction))


@_writes("clamp", "hardtanh")
def _clamp(call: _Call) -> str:
    value = call.like("self")
    for kind, names in (("Max", ("min", "min_val")), ("Min", ("max", "max_val"))):
        for limit in (call[name] for name in names if call.given.get(name) is not None):
            value = call.add(kind, value, call.like(limit))
    return value


@_writes("elu")
def _elu(call: _Call) -> str:
    if call["input_scale"] != 1:
        raise _UnknownError(f" with input_scale={call['input_scale']}")
    found = call.add("Elu", call.value("self"), alpha=float(call["alpha"]))
    return call.add("Mul", found, call.like("scale"))


@_writes("gelu")
def _gelu(call: _Call) -> str:
    """`x * (1 + erf(x / sqrt(2))) / 2`."""
    if call["approximate"] != "none":
        raise _UnknownError(f" with approximate={call['approximate']!r}")
    value = call.value("self")
    error = call.add("Erf", call.add("Mul", value, call.like(0.5**0.5)))
    return call.add(
        "Mul", value, call.add("Mul", call.add("Add", error, call.like(1)), call.like(0.5))
    )


def _weight(call: _Call, name: str, default: np.ndarray) -> str:
    """A weight, or the default that ONNX requires in its place."""
    given = call[name] is not None
    return call.value(name) if given else call.translation.graph.constant(default)


@_writes("native_layer_norm")
def _layer_norm(call: _Call) -> list[str]:
    shape, kind = call["normalized_shape"], _numpy(call.result[0].dtype)
    inputs = [call.value("input"), _weight(call, "weight", np.ones(shape, kind))]
    inputs += [] if call["bias"] is None else [call.value("bias")]
    return [call.add("LayerNormalization", *inputs, axis=-len(shape), epsilon=call["eps"])]


@_writes("_native_batch_norm_legit_no_training")
def _batch_norm(call: _Call) -> list[str]:
    zeros = np.zeros(call.shape("running_mean"), np.float32)
    weights = _weight(call, "weight", zeros + 1), _weight(call, "bias", zeros)
    inputs = call.value("input"), *weights, *map(call.value, ("running_mean", "running_var"))
    return [call.add("BatchNormalization", *inputs, epsilon=call["eps"])]


@_writes("view", "_unsafe_view", "reshape")
def _view(call: _Call) -> str:
    sizes = list(call.given.get("size", call.given.get("shape")))
    # A 0 is a real size, but ONNX does not allow that together with -1.
    zero = {} if any(isinstance(x, int) and x == -1 for x in sizes) else {"allowzero": 1}
    return call.add("Reshape", call.value("self"), call.sizes(sizes), **zero)


@_writes("repeat")
def _repeat(call: _Call) -> str:
    value, more = call.value("self"), len(call["repeats"]) - len(call.shape("self"))
    if more:
        value = call.add("Unsqueeze", value, call.sizes(range(more)))
    return call.add("Tile", value, call.sizes(call["repeats"]))


@_writes("squeeze")
def _squeeze(call: _Call) -> str:
    dims = [call["dim"]] if isinstance(call["dim"], int) else call["dim"]
    # torch keeps dimensions whose size is not 1.
    ones = [dim for dim in dims if call.shape("self")[dim] == 1]
    return call.add("Squeeze", call.value("self"), call.sizes(ones)) if ones else call.value("self")


@_writes("slice")
def _slice(call: _Call) -> str:
    end = np.iinfo(np.int64).max if call["end"] is None else call["end"]
    bounds = (call["start"] or 0, end, call["dim"], call["step"])
    return call.add("Slice", call.value("self"), *(call.sizes([bound]) for bound in bounds))


@_writes("split_with_sizes")
def _split(call: _Call) -> list[str]:
    sizes = call["split_sizes"]
    inputs = call.value("self"), call.sizes(sizes)
    return call.translation.graph.add_several("Split", len(sizes), *inputs, axis=call["dim"])


@_writes("constant_pad_nd")
def _pad(call: _Call) -> str:
    # Torch starts with the last dimension; ONNX wants all starts, then all ends.
    pad = list(call["pad"]) + [0] * (2 * call.result.ndim - len(call["pad"]))
    pads = call.sizes([*pad[-2::-2], *pad[::-2]])
    return call.add("Pad", call.value("self"), pads, call.like("value"))


@_writes("sym_size")
def _size(call: _Call) -> str:
    dim = call.translation.graph.constant(call["dim"], np.int64)
    return call.add("Gather", call.add("Shape", call.value("self")), dim)


@_writes("index")
def _index(call: _Call) -> str:
    """Elements at indices `[k]` of one dimension, or of several adjacent ones."""
    at = {dim: one for dim, one in enumerate(call["indices"]) if one is not None}
    dims, first = list(at), min(at)
    if {_type_of(one) for one in at.values()} - {torch.int64, torch.int32}:
        raise _UnknownError(" with an index that is not a whole number")
    shapes = {tuple(one.meta["val"].shape) for one in at.values()}
    if len(shapes) > 1 or len(*shapes) != 1 or dims != list(range(first, first + len(dims))):
        raise _UnknownError(" with an index of several dimensions")
    others = [dim for dim in range(len(call.shape("self"))) if dim not in at]
    last = call.sizes([-1])
    places = [
        call.add("Unsqueeze", call.translation.value(one, torch.int64), last) for one in at.values()
    ]
    moved = call.add("Transpose", call.value("self"), perm=[*dims, *others])
    found = call.add("GatherND", moved, call.add("Concat", *places, axis=-1))
    # The indexed dimension is the first now; move it back.
    back = [*range(1, first + 1), 0, *range(first + 1, call.result.ndim)]
    return call.add("Transpose", found, perm=back)
