"""Export as one ONNX file: from columns of the log to the probability of a click."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import compose, helper, numpy_helper
from torch.export import ExportedProgram

from stampede.data.formulas import DAY, HOUR, THURSDAY, WEEK
from stampede.data.learning.row_meanings import RowMeanings
from stampede.data.learning.vocabulary import FIRST_ROW
from stampede.data.raw.log import LARGEST
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.packaging import (
    RowType,
    described_model,
    export_dense_part,
    stored_rows,
)
from stampede.engine.inference.score_file import new_output
from stampede.engine.inference.trained import Trained, dense_model
from stampede.engine.tables import read_stored_field
from stampede.files import to_json

# Supported by onnxruntime since 1.14.
_OPSET, _LABEL_ENCODERS_OPSET, _IR_VERSION = 18, 2, 8
_LABEL_ENCODERS_DOMAIN = "ai.onnx.ml"

# The limit of a protobuf message, less room for nodes and names.
MOST_BYTES = 2**31 - 2**24

# The most ids of a vocabulary, and edges of buckets, that a file looks up itself.
MOST_IDS, _MOST_EDGES = 1_000_000, 1024

# Kinds of inputs by encoding; the other encodings depend on the number of ids or edges.
_KINDS = {
    "integer": "integer", "hour_of_day": "seconds", "weekday": "seconds", "hash": "row",
    "rows": "row",
}  # fmt: skip

# Bytes of an id in a file, besides its text.
_BYTES_BESIDES = 12

PROBABILITY, LOGIT = "probability", "logit"

# The first axis of inputs and outputs, and what names of the dense part start with.
_SAMPLES, _DENSE = "samples", "dense/"


def export_onnx(
    trained: Trained, path: Path, rows: RowType, overwrite: bool, most_ids: int = MOST_IDS
) -> dict[str, Any]:
    """Write an ONNX file; it appears once it is complete.

    Args:
        path: ends in `.onnx`.
        rows: how tables are stored, see `stored_rows`; the file computes in float32.
        most_ids: a larger vocabulary is left out; its input then takes rows of the table.

    Returns:
        The file's metadata: `inputs` (see `Inputs.described`), and the `fields`, `numbers` etc. of
        `described_model`.

    Raises:
        RunFolderError: the file exists or cannot be written, the model does not fit, or the run
            cannot be used.
    """
    if path.suffix != ".onnx":
        raise RunFolderError(f"{path}: the output is an ONNX file; write a NAME.onnx")
    if most_ids < 0:
        raise RunFolderError(f"--most-ids: found {most_ids}; write a number of at least 0")
    with new_output(path, overwrite) as unfinished:
        model, about = _model(trained, rows, most_ids)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(model.SerializeToString())
    return about


def _model(trained: Trained, rows: RowType, most_ids: int) -> tuple[onnx.ModelProto, dict]:
    about, meanings = described_model(trained, rows)
    inputs = Inputs(about, meanings, most_ids)
    graph = inputs.graph
    found = []
    for field in about["fields"]:
        weights = read_stored_field(trained.checkpoint, field["name"])
        table = {k: t.numpy() for k, t in stored_rows(weights, rows, field["name"]).items()}
        found.append(inputs.looked_up(field, table))
    one_after_the_other = graph.add("Concat", *found, axis=1)
    shape = graph.constant([0, len(found), about["dim"] + 1], np.int64)
    looked_up = graph.add("Reshape", one_after_the_other, shape)
    values = [looked_up, inputs.numbers(looked_up)]
    logit = graph.add_program(export_dense_part(dense_model(trained)), values)
    for name, value in ((PROBABILITY, graph.add("Sigmoid", logit)), (LOGIT, logit)):
        graph.rename(value, name)
        kind = onnx.TensorProto.FLOAT
        graph.model.graph.output.append(helper.make_tensor_value_info(name, kind, [_SAMPLES]))
    graph.model.graph.name = about["network"]
    graph.model.producer_name, graph.model.producer_version = "stampede", about["stampede"]
    about = {"inputs": inputs.described, **about}
    # The graph holds the edges, which may be many.
    about["fields"] = [{k: v for k, v in f.items() if k != "edges"} for f in about["fields"]]
    texts = {key: one if isinstance(one, str) else to_json(one) for key, one in about.items()}
    helper.set_model_props(graph.model, texts)
    return graph.model, about


class Graph:
    """Nodes and constants; a value is referred to by its name.

    Attributes:
        model: the ONNX model that holds the graph.
    """

    def __init__(self) -> None:
        self.model = onnx.ModelProto(
            ir_version=_IR_VERSION,
            opset_import=[
                helper.make_opsetid("", _OPSET),
                helper.make_opsetid(_LABEL_ENCODERS_DOMAIN, _LABEL_ENCODERS_OPSET),
            ],
        )
        self._names: set[str] = set()
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
        """A constant tensor of a numpy type."""
        array = np.asarray(values, dtype=kind)
        self.take(array.nbytes)
        name = self.name(f"constant_{len(self.model.graph.initializer)}")
        self.model.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one result; return the result's name."""
        name = self.name(f"{kind}_{len(self.model.graph.node)}")
        self.model.graph.node.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def rename(self, value: str, name: str) -> None:
        """Give a value a further name."""
        self.model.graph.node.append(helper.make_node("Identity", [value], [name]))

    def cast(self, value: str, kind: type[np.generic]) -> str:
        """A value cast to a numpy type."""
        return self.add("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(kind)))

    def add_program(self, program: ExportedProgram, inputs: Sequence[str]) -> str:
        """Add the nodes of a program, see `export_dense_part`; return the name of its result.

        Args:
            inputs: names of the values of its inputs.

        Raises:
            RunFolderError: torch.onnx cannot translate an operator; the message names it.
        """
        dense = _translated(program).graph
        # A prefix, as its values may have names of columns. Those of weights are given here:
        # `compose` itself leaves them out in the branches of a condition.
        names = {weight.name: _DENSE + weight.name for weight in dense.initializer}
        compose.add_prefix_graph(dense, _DENSE, inplace=True, name_map=names)
        for value, given in zip(inputs, dense.input, strict=True):
            self.rename(value, given.name)
        for node in dense.node:
            # They tell where the network's Python files are.
            node.ClearField("metadata_props")
        self.take(sum(weight.ByteSize() for weight in dense.initializer))
        self.model.graph.initializer.extend(dense.initializer)
        self.model.graph.node.extend(dense.node)
        return self.cast(dense.output[0].name, np.float32)


def _translated(program: ExportedProgram) -> onnx.ModelProto:
    try:
        # Of the attention of torch itself, torch.onnx knows only that of four dimensions.
        program = program.run_decompositions()
        found = torch.onnx.export(program, dynamo=True, opset_version=_OPSET, verbose=False)
        return found.model_proto
    except torch.onnx.OnnxExporterError as failure:
        # The text has a line for the node: `call_function[target=torch.ops.NAME](args = ...`.
        node = re.search(r"\[target=(?:torch\.ops\.)?([\w.]+)\]", str(failure))
        raise RunFolderError(
            "the network cannot be written as ONNX: torch.onnx cannot translate "
            f"{node[1] if node else repr(failure.__cause__)}; use other torch functions in its "
            "forward, or leave out --format onnx"
        ) from failure


class Inputs:
    """The graph from raw columns to looked-up rows and numbers.

    Attributes:
        graph: the graph to add the inputs to.
        described: of each input its `name`, `column`, `kind` (text, integer, number, seconds, or
            row, of the field's table), whether it is `[samples, ids]` (`multi`), and `fields`.

    Args:
        about: see `described_model`.
        most_ids: see `export_onnx`.
    """

    def __init__(
        self, about: dict[str, Any], meanings: dict[str, RowMeanings], most_ids: int
    ) -> None:
        self.graph = graph = Graph()
        self._add, self._constant, self._cast = graph.add, graph.constant, graph.cast
        self.described: list[dict[str, Any]] = []
        self._about, self._meanings, self._most_ids = about, meanings, most_ids
        self._inputs: dict[tuple[str, str, bool], dict[str, Any]] = {}
        for name in (PROBABILITY, LOGIT):
            self.graph.name(name)
        # Inputs come first, so that they get their plain names.
        for field in about["fields"]:
            self._input(field)
        for number in about["numbers"]:
            self._input(number, "number")

    def _input(self, field: dict[str, Any], kind: str | None = None) -> str:
        """The name of a field's or number's input; several may share one."""
        kind, multi = kind or self._kind(field), field.get("multi", False)
        column = field["column"] or self._about["time"]["column"]
        # Inputs that are rows of tables cannot be shared.
        key = (field["name"] if kind == "row" else column, kind, multi)
        if key not in self._inputs:
            name = self.graph.name(key[0])
            described = {"name": name, "column": column, "kind": kind, "multi": multi, "fields": []}
            self._inputs[key] = described
            self.described.append(described)
            types = {"number": onnx.TensorProto.DOUBLE, "text": onnx.TensorProto.STRING}
            shape = [_SAMPLES, f"ids of {name}"] if multi else [_SAMPLES]
            found = types.get(kind, onnx.TensorProto.INT64)
            self.graph.model.graph.input.append(helper.make_tensor_value_info(name, found, shape))
        described = self._inputs[key]
        if field["name"] not in described["fields"]:
            described["fields"].append(field["name"])
        return described["name"]

    def _kind(self, field: dict[str, Any]) -> str:
        encode = field["encode"]
        if encode == "vocabulary":
            return "text" if field["rows"] - FIRST_ROW <= self._most_ids else "row"
        if encode == "quantiles":
            return "number" if len(field["edges"]) <= _MOST_EDGES else "row"
        return _KINDS[encode]

    def _whole(self, values: Any) -> str:
        return self._constant(values, np.int64)

    def numbers(self, rows: str) -> str:
        """The network's numbers, `[samples, numbers]` float32; `rows` has an entry per sample."""
        wanted = self._about["numbers"]
        if not wanted:
            first, end = self._whole([0]), self._whole([1])
            samples = self._add("Slice", self._add("Shape", rows), first, end)
            shape = self._add("Concat", samples, self._whole([0]), axis=0)
            return self._add("ConstantOfShape", shape)
        columns = self._add("Concat", *(self._input(one, "number") for one in wanted), axis=0)
        shape = self._whole([len(wanted), -1])
        given = self._add("Transpose", self._add("Reshape", columns, shape), perm=[1, 0])
        fills = self._constant([one["fill"] for one in wanted], np.float64)
        value = self._add("Where", self._is_number(given), given, fills)
        logged = ["log1p" in one["transform"] for one in wanted]
        if any(logged):
            positive = self._add("Max", value, self._constant(0, np.float64))
            logs = self._add("Log", self._add("Add", positive, self._constant(1, np.float64)))
            value = self._add("Where", self._constant(logged, np.bool_), logs, value)
        scales = zip(*map(_scale, wanted), strict=True)
        for kind, numbers in zip(("Sub", "Div", "Max", "Min"), scales, strict=True):
            value = self._add(kind, value, self._constant(numbers, np.float64))
        narrow = self._cast(value, np.dtype(self._about["numbers_dtype"]).type)
        return self._cast(narrow, np.float32)

    def _is_number(self, value: str) -> str:
        """Whether a value is present; one too large for float32 counts as missing."""
        size = self._add("Abs", value)
        return self._add("LessOrEqual", size, self._constant(LARGEST, np.float64))

    def looked_up(self, field: dict[str, Any], table: dict[str, np.ndarray]) -> str:
        """Embedding and first-order weight of a field, `[samples, dim + 1]` float32."""
        rows = self._rows(field)
        if not field["multi"]:
            return self._weights(table, rows)
        # Mask padding, cut to `max_ids`, and add an id for a missing value.
        is_id = self._is_row(rows, field)
        if field["max_ids"] is not None:
            places = self._add("CumSum", self._cast(is_id, np.int64), self._whole(1))
            most = self._whole(field["max_ids"])
            is_id = self._add("And", is_id, self._add("LessOrEqual", places, most))
        rows = self._add("Where", is_id, rows, self._whole(0))
        if field["missing_row"] is not None:
            axis = self._whole([1])
            count = self._add("ReduceSum", self._cast(is_id, np.int64), axis, keepdims=1)
            is_missing = self._add("Equal", count, self._whole(0))
            values = (self._whole(field["missing_row"]), self._whole(0))
            rows = self._add("Concat", rows, self._add("Where", is_missing, *values), axis=1)
            is_id = self._add("Concat", is_id, is_missing, axis=1)
        axis = self._whole([-1])
        shares = self._add("Unsqueeze", self._cast(is_id, np.float32), axis)
        weights = self._add("Mul", self._weights(table, rows), shares)
        return self._add("ReduceSum", weights, self._whole([1]), keepdims=0)

    def _rows(self, field: dict[str, Any]) -> str:
        """Rows of a field's table, int64; in fields with several ids, non-rows are padding."""
        kind, value = self._kind(field), self._input(field)
        if kind == "text":
            return self._rows_of_texts(field, value)
        if kind == "number":
            one = self._whole([1])
            edges = self._constant(field["edges"], np.float64)
            below = self._add("Less", edges, self._add("Unsqueeze", value, one))
            count = self._add("ReduceSum", self._cast(below, np.int64), one, keepdims=0)
            # The row for missing numbers comes before the buckets.
            missing = self._whole(field["missing_row"])
            row = self._add("Add", self._add("Add", count, missing), self._whole(1))
            return self._add("Where", self._is_number(value), row, missing)
        if field["multi"]:
            return value
        # Without a row for missing values, use a row past the end, which the runtime refuses.
        missing = field["rows"] if field["missing_row"] is None else field["missing_row"]
        is_row = self._is_row(value, field)
        if kind == "seconds":
            value = self._part_of_time(field["encode"], value)
        return self._add("Where", is_row, value, self._whole(missing))

    def _rows_of_texts(self, field: dict[str, Any], value: str) -> str:
        """Rows of ids of a vocabulary; in fields with several ids, missing ones are -1."""
        missing = -1 if field["multi"] else field["missing_row"]
        texts = self._meanings[field["name"]].values().to_list()
        rows = dict(zip(texts, range(FIRST_ROW, FIRST_ROW + len(texts)), strict=True))
        rows |= dict.fromkeys(self._about["missing"], missing)
        if field["multi"]:
            rows[""] = missing
        self.graph.take(sum(len(text.encode()) + _BYTES_BESIDES for text in rows))
        return self._add(
            "LabelEncoder",
            value,
            domain=_LABEL_ENCODERS_DOMAIN,
            keys_strings=list(rows),
            values_int64s=list(rows.values()),
            default_int64=field["unseen_row"],
        )

    def _is_row(self, value: str, field: dict[str, Any]) -> str:
        """Whether a whole number is a row of the table, an id of the log, or a time."""
        kind = self._kind(field)
        is_row = self._add("GreaterOrEqual", value, self._whole(0))
        if kind == "seconds":
            return is_row
        limit = field["size"] if kind == "integer" else field["rows"]
        return self._add("And", is_row, self._add("Less", value, self._whole(limit)))

    def _part_of_time(self, part: str, seconds: str) -> str:
        """See `part_of_time` of `stampede.data.formulas`; undefined before 1970."""
        if part == "hour_of_day":
            return self._add("Div", self._add("Mod", seconds, self._whole(DAY)), self._whole(HOUR))
        days = self._add("Add", self._add("Div", seconds, self._whole(DAY)), self._whole(THURSDAY))
        return self._add("Mod", days, self._whole(WEEK))

    def _weights(self, table: dict[str, np.ndarray], rows: str) -> str:
        """Embedding and first-order weight of rows, `[..., dim + 1]` float32."""
        first_order = table["first_order"][:, None]
        if "scale" not in table:
            whole = np.concatenate([table["embedding"], first_order], 1)
            return self._cast(self._add("Gather", self._constant(whole), rows), np.float32)
        embedding, scale, weight = (
            self._cast(self._add("Gather", self._constant(part), rows), np.float32)
            for part in (table["embedding"], table["scale"][:, None], first_order)
        )
        return self._add("Concat", self._add("Mul", embedding, scale), weight, axis=-1)


def _scale(number: dict[str, Any]) -> tuple[float, float, float, float]:
    """Offset, divisor and limits of a number; see `scaled` of the formulas."""
    if "minmax" in number["transform"]:
        width = number["high"] - number["low"]
        return number["low"], width if width > 0 else 1.0, 0.0, 1.0
    deviation = number["deviation"]
    if "standard" in number["transform"]:
        return number["mean"], deviation if deviation > 0 else 1.0, -np.inf, np.inf
    return 0.0, 1.0, -np.inf, np.inf
