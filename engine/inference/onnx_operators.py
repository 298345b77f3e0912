"""Builds an ONNX graph; translates the dense part of a model from torch operators to its nodes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from stampede.engine.errors import RunFolderError
from stampede.engine.inference.packaging import program_weights

# Supported by onnxruntime since 1.14.
OPSET, LABEL_ENCODERS_OPSET, IR_VERSION = 18, 2, 8
LABEL_ENCODERS_DOMAIN = "ai.onnx.ml"

# The limit of a protobuf message, less room for nodes and names.
MOST_BYTES = 2**31 - 2**24


class Graph:
    """Nodes and constants; a value is referred to by its name.

    Attributes:
        model: the ONNX model that holds the graph.
    """

    def __init__(self) -> None:
        self.model = onnx.ModelProto(
            ir_version=IR_VERSION,
            opset_import=[
                helper.make_opsetid("", OPSET),
                helper.make_opsetid(LABEL_ENCODERS_DOMAIN, LABEL_ENCODERS_OPSET),
            ],
        )
        self._names: set[str] = set()
        self._constants: dict[Any, str] = {}
        self._bytes = 0

    def name(self, wanted: str) -> str:
        """An unused name."""
        while wanted in self._names:
            wanted += "_"
        self._names.add(wanted)
        return wanted

    def take(self, size: int) -> None:
        """Count bytes of the file.

        Raises:
            RunFolderError: the file would be too large.
        """
        self._bytes += size
        if self._bytes > MOST_BYTES:
            raise RunFolderError(
                f"the tables and vocabularies have more than {MOST_BYTES:,} bytes, the limit of "
                "an ONNX file; write --rows fp16 or int8, or leave out --format onnx"
            )

    def constant(self, values: Any, kind: type[np.generic] | None = None) -> str:
        """A constant tensor of a numpy type; small equal ones are shared."""
        array = np.asarray(values, dtype=kind)
        data = array.tobytes()
        key = (array.dtype, array.shape, data)
        if len(data) < 100 and key in self._constants:
            return self._constants[key]
        self.take(len(data))
        name = self.name(f"constant_{len(self.model.graph.initializer)}")
        self.model.graph.initializer.add(
            name=name,
            dims=array.shape,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            raw_data=data,
        )
        if len(data) < 100:
            self._constants[key] = name
        return name

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one result; return the result's name."""
        return self.add_several(kind, 1, *inputs, **attributes)[0]

    def add_several(self, kind: str, results: int, *inputs: str, **attributes: Any) -> list[str]:
        """Add a node with several results; return their names."""
        names = [self.name(f"{kind}_{len(self.model.graph.node)}") for _ in range(results)]
        self.model.graph.node.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def cast(self, value: str, kind: type[np.generic]) -> str:
        """A value cast to a numpy type."""
        return self.add("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(kind)))


_NUMPY = {
    torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16,
    torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16, torch.int8: np.int8,
    torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip


class _UnknownError(Exception):
    """An operator without a translation; the text may name its arguments."""


def add_program(graph: Graph, program: ExportedProgram, inputs: Sequence[str]) -> str:
    """Add the nodes of a program, see `export_dense_part`; return the name of its result.

    Args:
        inputs: names of the values of its inputs.

    Raises:
        RunFolderError: an operator has no translation; the message names it.
    """
    program = program.run_decompositions()
    weights, known = program_weights(program)
    signature, nodes = program.graph_signature, {node.name: node for node in program.graph.nodes}
    values: dict[Node, Any] = {
        nodes[name]: value for name, value in zip(signature.user_inputs, inputs, strict=True)
    }
    output = nodes[signature.user_outputs[0]]
    needed = {output}
    for node in reversed(nodes.values()):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in nodes.values():
        if node not in needed or node in values:
            continue
        if node.op == "placeholder":
            weight = weights[known[node.name]["weight"]]
            values[node] = graph.constant(weight.detach().numpy())
            continue
        try:
            values[node] = _written(graph, values, node)
        except _UnknownError as failure:
            raise RunFolderError(
                f"the network cannot be written as ONNX: {node.target}{failure} has no "
                "translation here; use other torch functions in its forward, or leave out "
                "--format onnx"
            ) from None
    return _Call(graph, values, {}, None).cast(output, torch.float32)


def _written(graph: Graph, values: dict[Node, Any], node: Node) -> Any:
    """The name of a node's result, or a list of names."""
    if node.target is operator.getitem:
        return values[node.args[0]][node.args[1]]
    if node.target in _ON_SIZES:
        call = _Call(graph, values, {}, None)
        return call.add(_ON_SIZES[node.target], *(call.cast(one, torch.int64) for one in node.args))
    schema = getattr(node.target, "_schema", None)
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    if schema is None or name not in _OPERATORS:
        raise _UnknownError
    names = [one.name for one in schema.arguments]
    defaults = {one.name: one.default_value for one in schema.arguments}
    given = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    return _OPERATORS[name](_Call(graph, values, given, node.meta["val"]))


@dataclass(frozen=True)
class _Call:
    """An operator of torch with its arguments.

    Attributes:
        values: names of the values of earlier nodes, or lists of names.
        given: arguments by name, defaults included.
        result: as `torch.export` traced it: type and shape.
    """

    graph: Graph
    values: dict[Node, Any]
    given: dict[str, Any]
    result: Any

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; return the name of its result."""
        return self.graph.add(kind, *inputs, **attributes)

    def cast(self, given: Any, kind: torch.dtype | None) -> str:
        """The name of a value, cast to a torch type unless None."""
        if not isinstance(given, Node):
            return self.graph.constant(given, _numpy(kind))
        value = self.values[given]
        return value if kind in (None, _type_of(given)) else self.graph.cast(value, _numpy(kind))

    def value(self, argument: str) -> str:
        """An argument's value, not cast."""
        return self.cast(self.given[argument], None)

    def like(self, given: Any) -> str:
        """A value, or a named argument, cast to the type of the result."""
        given = self.given[given] if isinstance(given, str) else given
        return self.cast(given, self.result.dtype)

    def sizes(self, given: Iterable[Any]) -> str:
        """Whole numbers, some of them perhaps computed, as `[n]` int64."""
        given = list(given)
        if not any(isinstance(one, Node) for one in given):
            return self.graph.constant(given, np.int64)
        one = self.graph.constant([1], np.int64)
        sizes = [self.cast(size, torch.int64) for size in given]
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
}  # fmt: skip

_REDUCTIONS = {
    "amax": "ReduceMax", "amin": "ReduceMin", "linalg_vector_norm": "ReduceL2",
    "mean": "ReduceMean", "prod": "ReduceProd", "sum": "ReduceSum",
}  # fmt: skip


def _plain(kind: str, *inputs: str, **attributes: str) -> Callable[[_Call], str]:
    """A node whose inputs, not cast, and attributes are arguments."""
    return lambda call: call.add(
        kind, *map(call.value, inputs), **{key: call[one] for key, one in attributes.items()}
    )


def _check_bits(call: _Call, kind: str) -> None:
    """ONNX has these only for booleans."""
    if kind in ("Not", "And", "Or", "Xor") and call.result.dtype != torch.bool:
        raise _UnknownError(f" of {call.result.dtype}")


def _unary(kind: str, call: _Call) -> str:
    _check_bits(call, kind)
    return call.add(kind, call.like("self"))


def _binary(kind: str, call: _Call) -> str:
    if call.given.get("rounding_mode") is not None:
        raise _UnknownError(f" with rounding_mode={call['rounding_mode']!r}")
    _check_bits(call, kind)
    one, other = (call.like(value) for value in list(call.given.values())[:2])
    if call.given.get("alpha", 1) != 1:
        other = call.add("Mul", other, call.like("alpha"))
    return call.add(kind, one, other)


def _comparison(kind: str, call: _Call) -> str:
    both = list(call.given.values())
    common = torch.result_type(*(x.meta["val"] if isinstance(x, Node) else x for x in both))
    return call.add(kind, *(call.cast(x, common) for x in both))


def _reduction(kind: str, call: _Call) -> str:
    if call.given.get("ord", 2) != 2:
        raise _UnknownError(f" with ord={call['ord']}")
    return _reduced(call, kind, call.like("self"))


def _reduced(call: _Call, kind: str, value: str) -> str:
    dims = call.given.get("dim")
    axes = [call.sizes([dims] if isinstance(dims, int) else dims)] if dims not in (None, []) else []
    return call.add(kind, value, *axes, keepdims=int(call.given.get("keepdim", False)))


def _any(call: _Call) -> str:
    number = call.graph.cast(call.value("self"), np.int32)
    return call.graph.cast(_reduced(call, "ReduceMax", number), np.bool_)


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


def _clamp(call: _Call) -> str:
    value = call.like("self")
    for kind, names in (("Max", ("min", "min_val")), ("Min", ("max", "max_val"))):
        for limit in (call[name] for name in names if call.given.get(name) is not None):
            value = call.add(kind, value, call.like(limit))
    return value


def _elu(call: _Call) -> str:
    if call["input_scale"] != 1:
        raise _UnknownError(f" with input_scale={call['input_scale']}")
    found = call.add("Elu", call.value("self"), alpha=float(call["alpha"]))
    return call.add("Mul", found, call.like("scale"))


def _gelu(call: _Call) -> str:
    """`x * (1 + erf(x / sqrt(2))) / 2`."""
    if call["approximate"] != "none":
        raise _UnknownError(f" with approximate={call['approximate']!r}")
    value, half = call.value("self"), call.like(0.5)
    error = call.add("Erf", call.add("Mul", value, call.like(0.5**0.5)))
    return call.add("Mul", value, call.add("Mul", call.add("Add", error, call.like(1)), half))


def _weight(call: _Call, name: str, default: np.ndarray) -> str:
    """A weight, or the default that ONNX requires in its place."""
    return call.graph.constant(default) if call[name] is None else call.value(name)


def _layer_norm(call: _Call) -> list[str]:
    shape, kind = call["normalized_shape"], _numpy(call.result[0].dtype)
    inputs = [call.value("input"), _weight(call, "weight", np.ones(shape, kind))]
    inputs += [] if call["bias"] is None else [call.value("bias")]
    return [call.add("LayerNormalization", *inputs, axis=-len(shape), epsilon=call["eps"])]


def _batch_norm(call: _Call) -> list[str]:
    zeros = np.zeros(call.shape("running_mean"), np.float32)
    weights = _weight(call, "weight", zeros + 1), _weight(call, "bias", zeros)
    inputs = call.value("input"), *weights, *map(call.value, ("running_mean", "running_var"))
    return [call.add("BatchNormalization", *inputs, epsilon=call["eps"])]


def _view(call: _Call) -> str:
    sizes = list(call.given.get("size", call.given.get("shape")))
    # A 0 is a real size, but ONNX does not allow that together with -1.
    zero = {} if any(isinstance(x, int) and x == -1 for x in sizes) else {"allowzero": 1}
    return call.add("Reshape", call.value("self"), call.sizes(sizes), **zero)


def _repeat(call: _Call) -> str:
    value, more = call.value("self"), len(call["repeats"]) - len(call.shape("self"))
    if more:
        value = call.add("Unsqueeze", value, call.sizes(range(more)))
    return call.add("Tile", value, call.sizes(call["repeats"]))


def _squeeze(call: _Call) -> str:
    dims = [call["dim"]] if isinstance(call["dim"], int) else call["dim"]
    # torch keeps dimensions whose size is not 1.
    ones = [dim for dim in dims if call.shape("self")[dim] == 1]
    return call.add("Squeeze", call.value("self"), call.sizes(ones)) if ones else call.value("self")


def _slice(call: _Call) -> str:
    end = np.iinfo(np.int64).max if call["end"] is None else call["end"]
    bounds = (call["start"] or 0, end, call["dim"], call["step"])
    return call.add("Slice", call.value("self"), *(call.sizes([bound]) for bound in bounds))


def _split(call: _Call) -> list[str]:
    sizes = call["split_sizes"]
    inputs = call.value("self"), call.sizes(sizes)
    return call.graph.add_several("Split", len(sizes), *inputs, axis=call["dim"])


def _pad(call: _Call) -> str:
    # Torch starts with the last dimension; ONNX wants all starts, then all ends.
    pad = list(call["pad"]) + [0] * (2 * call.result.ndim - len(call["pad"]))
    pads = call.sizes([*pad[-2::-2], *pad[::-2]])
    return call.add("Pad", call.value("self"), pads, call.like("value"))


def _size(call: _Call) -> str:
    dim = call.graph.constant(call["dim"], np.int64)
    return call.add("Gather", call.add("Shape", call.value("self")), dim)


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
    places = [call.add("Unsqueeze", call.cast(one, torch.int64), last) for one in at.values()]
    moved = call.add("Transpose", call.value("self"), perm=[*dims, *others])
    found = call.add("GatherND", moved, call.add("Concat", *places, axis=-1))
    # The indexed dimension is the first now; move it back.
    back = [*range(1, first + 1), 0, *range(first + 1, call.result.ndim)]
    return call.add("Transpose", found, perm=back)


_OPERATORS: dict[str, Callable[[_Call], Any]] = {
    **{name: partial(_unary, kind) for name, kind in _UNARY.items()},
    **{name: partial(_binary, kind) for name, kind in _BINARY.items()},
    **{name: partial(_comparison, kind) for name, kind in _COMPARISONS.items()},
    **{name: partial(_reduction, kind) for name, kind in _REDUCTIONS.items()},
    **dict.fromkeys(
        ("alias", "clone", "contiguous", "detach", "lift_fresh_copy", "_to_copy"),
        lambda call: call.like("self"),
    ),
    "ne": lambda call: call.add("Not", _comparison("Equal", call)),
    "scalar_tensor": lambda call: call.like("s"),
    "rsqrt": lambda call: call.add("Reciprocal", call.add("Sqrt", call.like("self"))),
    "log1p": lambda call: call.add("Log", call.add("Add", call.like("self"), call.like(1))),
    "expm1": lambda call: call.add("Sub", call.add("Exp", call.like("self")), call.like(1)),
    "where": lambda call: call.add(
        "Where", call.value("condition"), call.like("self"), call.like("other")
    ),
    "leaky_relu": _plain("LeakyRelu", "self", alpha="negative_slope"),
    "_softmax": _plain("Softmax", "self", axis="dim"),
    "_log_softmax": _plain("LogSoftmax", "self", axis="dim"),
    **dict.fromkeys(("mm", "bmm"), _plain("MatMul", "self", "mat2")),
    "index_select": _plain("Gather", "self", "index", axis="dim"),
    "gather": _plain("GatherElements", "self", "index", axis="dim"),
    "embedding": _plain("Gather", "weight", "indices"),
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
        "Gather", call.value("self"), call.cast(call["index"], torch.int64), axis=call["dim"]
    ),
    "cat": lambda call: call.add("Concat", *map(call.like, call["tensors"]), axis=call["dim"]),
    "full": lambda call: call.add("Expand", call.like("fill_value"), call.sizes(call["size"])),
    "full_like": lambda call: call.add(
        "Expand", call.like("fill_value"), call.add("Shape", call.value("self"))
    ),
    "arange": lambda call: call.add("Range", *map(call.like, ("start", "end", "step"))),
    "any": _any,
    "var": _var,
    "clamp": _clamp,
    "hardtanh": _clamp,
    "elu": _elu,
    "gelu": _gelu,
    "native_layer_norm": _layer_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "repeat": _repeat,
    "squeeze": _squeeze,
    "slice": _slice,
    "split_with_sizes": _split,
    "constant_pad_nd": _pad,
    "sym_size": _size,
    "index": _index,
}
