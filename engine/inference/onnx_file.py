"""Export as one ONNX file: from columns of the log to the probability of a click."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, compose, helper
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.nn import functional

from stampede.data.formulas import (
    BOOLEANS,
    DAY,
    FIRST_TIME,
    HOUR,
    LARGEST,
    LAST_TIME,
    THURSDAY,
    WEEK,
    MarkedValues,
    texts_of_marks,
    values_of_marks,
)
from stampede.data.learning.rows_of_ids import FIRST_ROW
from stampede.data.schema.schema import HISTORIES
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.dense_part import SAMPLES, DensePart, exported
from stampede.engine.inference.options import RowType
from stampede.engine.inference.package.load import together
from stampede.engine.inference.packaging import described_model, stored_rows
from stampede.engine.inference.prediction import names_by_goal
from stampede.engine.inference.trained import Trained, dense_model, new_output
from stampede.engine.tables import read_stored_field
from stampede.files import to_json
from stampede.models import CTRModel

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

_WHOLE = re.compile(r"-?[1-9]\d*|0")

# Bytes of an id in a file, besides its text.
_BYTES_BESIDES = 12

PROBABILITY, LOGIT = "probability", "logit"

# The first axis of inputs and outputs, and what names of values in between start with, as columns
# may have any name.
_SAMPLES, _INSIDE = "samples", "inside/"


def export_onnx(
    trained: Trained, path: Path, rows: RowType, overwrite: bool, most_ids: int = MOST_IDS
) -> dict[str, Any]:
    """Write an ONNX file; it appears once it is complete.

    Args:
        path: ends in `.onnx`.
        rows: how tables are stored, see `stored_rows`; the file computes in float32.
        most_ids: a larger vocabulary is left out; its input then takes rows of the table.

    Returns:
        The file's metadata: `inputs` (see `described_inputs`), and the `fields`, `numbers` etc. of
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
    inputs, names = described_inputs(about, most_ids)
    fields: list[Field] = []
    encoders: dict[int, dict[str, Any]] = {}
    tables: dict[str, dict[str, Tensor]] = {}
    model = dense_model(trained)
    size = sum(weights.nbytes for weights in model.state_dict().values() if not weights.is_meta)
    for number, field in enumerate(about["fields"]):
        kind, name = _kind(field, most_ids), field["name"]
        if kind == "text":
            texts = meanings[name].values().to_list()
            encoders[number] = _label_encoder(field, texts, about)
            keys = encoders[number]["keys_strings"]
            size += sum(len(text.encode()) + _BYTES_BESIDES for text in keys)
        table = field["table"] or name
        if table not in tables:
            stored = stored_rows(read_stored_field(trained.checkpoint, table), rows, table)
            tables[table] = _buffers(stored)
            size += sum(tensor.nbytes for tensor in tables[table].values())
        fields.append(Field(field, kind, tables[table], about["missing"]))
        # Before the next table is read.
        if size > MOST_BYTES:
            raise RunFolderError(
                f"the tables and vocabularies have more than {MOST_BYTES:,} bytes, the limit of "
                "an ONNX file; write --rows fp16 or int8, or leave out --format onnx"
            )
    onnx_model = translated(Scoring(about, fields, model).exported())
    graph = onnx_model.graph
    nodes = []
    for number, (name, value) in enumerate(zip(names, graph.input, strict=True)):
        kind = "LabelEncoder" if number in encoders else "Identity"
        nodes.append(helper.make_node(kind, [name], [value.name], **encoders.get(number, {})))
    nodes.extend(graph.node)
    types = {
        "number": TensorProto.DOUBLE,
        "weights": TensorProto.DOUBLE,
        "text": TensorProto.STRING,
    }
    taken, given = [], []
    for one in inputs:
        shape = [_SAMPLES, f"ids of {one['name']}"][: 1 + one["multi"]]
        kind = types.get(one["kind"], TensorProto.INT64)
        taken.append(helper.make_tensor_value_info(one["name"], kind, shape))
    for value, name in zip(graph.output, _outputs(about), strict=True):
        nodes.append(helper.make_node("Identity", [value.name], [name]))
        given.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [_SAMPLES]))
    for part, values in {"node": nodes, "input": taken, "output": given, "value_info": []}.items():
        graph.ClearField(part)
        getattr(graph, part).extend(values)
    graph.name = about["network"]
    onnx_model.producer_name, onnx_model.producer_version = "stampede", about["stampede"]
    about = {"inputs": inputs, **about}
    # The graph holds the edges, which may be many.
    about["fields"] = [{k: v for k, v in f.items() if k != "edges"} for f in about["fields"]]
    texts = {key: one if isinstance(one, str) else to_json(one) for key, one in about.items()}
    helper.set_model_props(onnx_model, texts)
    return onnx_model, about


def described_inputs(
    about: dict[str, Any], most_ids: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The inputs of a file, and the name of the input of each field, of each number, and then of
    the weights of each field that has some.

    An input's `kind` is text, integer, number, seconds, weights, or row (of the field's table); it
    is `[samples, ids]` if `multi`, and else `[samples]`. Several `fields` and numbers may share
    one.

    Args:
        about: see `described_model`.
        most_ids: see `export_onnx`.
    """
    inputs: dict[tuple[str, str, bool], dict[str, Any]] = {}
    taken, names = set(_outputs(about)), []
    wanted = [(field, _kind(field, most_ids)) for field in about["fields"]]
    wanted += ((number, "number") for number in about["numbers"])
    wanted += (({**field, "column": field["weights"]}, "weights") for field in _weighted(about))
    for one, kind in wanted:
        column, multi = one["column"] or about["time"]["column"], one.get("multi", False)
        # Inputs that are rows of tables cannot be shared.
        key = (one["name"] if kind == "row" else column, kind, multi)
        if key not in inputs:
            name = key[0]
            while name in taken:
                name += "_"
            taken.add(name)
            described = {"name": name, "column": column, "kind": kind, "multi": multi, "fields": []}
            inputs[key] = described
        if one["name"] not in inputs[key]["fields"]:
            inputs[key]["fields"].append(one["name"])
        names.append(inputs[key]["name"])
    return list(inputs.values()), names


def _weighted(about: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields whose ids have weights."""
    return [field for field in about["fields"] if field.get("weights") is not None]


def _outputs(about: dict[str, Any]) -> list[str]:
    """Names of the outputs, `[samples]` each."""
    return [name for kind in (PROBABILITY, LOGIT) for name in names_by_goal(kind, about["goals"])]


def _kind(field: dict[str, Any], most_ids: int) -> str:
    encode = field["encode"]
    if encode == "vocabulary":
        return "text" if field["rows"] - FIRST_ROW <= most_ids else "row"
    if encode == "quantiles":
        return "number" if len(field["edges"]) <= _MOST_EDGES else "row"
    return _KINDS[encode]


def _label_encoder(
    field: dict[str, Any], texts: list[str], about: dict[str, Any]
) -> dict[str, Any]:
    """From a vocabulary's ids to rows; in fields with several ids, missing ones are -1."""
    missing = texts_of_marks(about["missing"])
    missing_row = -1 if field["multi"] else field["missing_row"]
    rows = dict(zip(texts, range(FIRST_ROW, FIRST_ROW + len(texts)), strict=True))
    # As pandas writes whole numbers with missing values; see `written_alike`.
    rows |= {f"{text}.0": row for text, row in rows.items() if _WHOLE.fullmatch(text)}
    rows |= {text: rows[word] for text, word in BOOLEANS.items() if word in rows}
    rows |= dict.fromkeys([*missing, ""] if field["multi"] else missing, missing_row)
    return {
        "domain": _LABEL_ENCODERS_DOMAIN,
        "keys_strings": list(rows),
        "values_int64s": list(rows.values()),
        "default_int64": field["unseen_row"],
    }


class Scoring(nn.Module):
    """From a value of each field and number, see `described_inputs`, to the scores.

    A text comes as its row of the table, as torch has no texts.
    """

    def __init__(self, about: dict[str, Any], fields: list[Field], model: CTRModel) -> None:
        super().__init__()
        self.fields = nn.ModuleList(fields)
        dtype = getattr(torch, about["numbers_dtype"])
        self.numbers = Numbers(about["numbers"], dtype, about["missing"])
        self.dense = DensePart(model)

    def forward(
        self, values: list[Tensor], numbers: list[Tensor], weights: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Probabilities, then logits, `[samples]` float32 of each goal."""
        pooled, of_ids, masks = [], [], []
        left = iter(weights)
        for field, value in zip(self.fields, values, strict=True):
            if field.about["pooling"] not in HISTORIES:
                pooled.append(field(value, next(left) if field.about["weights"] else None))
                continue
            rows, is_id = field.of_ids(value)
            of_ids.append(rows)
            masks.append(is_id)
            if field.about["pooling"] == "attention":
                pooled.append(torch.zeros_like(rows[:, 0]))
        numbers = self.numbers(numbers, len(values[0]))
        logits = self.dense(together(pooled), numbers, of_ids, masks).float()
        if logits.ndim == 1:
            return logits.sigmoid(), logits
        return (*logits.sigmoid().unbind(1), *logits.unbind(1))

    def exported(self) -> ExportedProgram:
        """A program for any number of samples, and of ids in a sample."""
        samples, values, shapes = Dim(_SAMPLES, min=1), [], []
        for field in self.fields:
            multi, is_number = field.about["multi"], field.kind == "number"
            size = [SAMPLES, SAMPLES + 1][: 1 + multi]
            values.append(torch.zeros(size, dtype=torch.float64 if is_number else torch.int64))
            shapes.append({0: samples, 1: Dim.DYNAMIC} if multi else {0: samples})
        count = len(self.numbers.about)
        numbers = [torch.zeros(SAMPLES, dtype=torch.float64) for _ in range(count)]
        weighted = _weighted({"fields": [field.about for field in self.fields]})
        weights = [torch.ones(SAMPLES, SAMPLES + 1, dtype=torch.float64) for _ in weighted]
        shapes = {
            "values": shapes,
            "numbers": [{0: samples}] * count,
            "weights": [{0: samples, 1: Dim.DYNAMIC}] * len(weights),
        }
        return exported(self, (values, numbers, weights), shapes, self.dense.model.network)


class Numbers(nn.Module):
    """The network's numbers, see `described_model`; for training they were stored in `dtype`."""

    def __init__(
        self, about: list[dict[str, Any]], dtype: torch.dtype, missing: Sequence[str]
    ) -> None:
        super().__init__()
        self.about, self.dtype, self.marks = about, dtype, values_of_marks(missing)
        self.register_buffer("logged", torch.tensor(["log1p" in one["transform"] for one in about]))
        scales = [(one["fill"], *_scale(one)) for one in about]
        self.register_buffer("scales", torch.tensor(scales, dtype=torch.float64).view(-1, 5).T)

    def forward(self, values: list[Tensor], samples: int) -> Tensor:
        """`[samples, numbers]` float32."""
        if not values:
            return torch.zeros(samples, 0)
        fill, offset, divisor, low, high = self.scales
        value = torch.stack(values, 1)
        is_number = _is_number(value, self.marks)
        value = torch.where(is_number, _rounded(value), fill)
        value = torch.where(self.logged, value.clamp_min(0.0).log1p(), value)
        value = torch.minimum(torch.maximum((value - offset) / divisor, low), high)
        return value.to(self.dtype).float()


def _rounded(value: Tensor) -> Tensor:
    """A number as the formulas read it from a log."""
    return value.float().double()


def _is_number(value: Tensor, marks: MarkedValues) -> Tensor:
    """Whether a value is present: no mark, and not too large for float32."""
    rounded = _rounded(value)
    found = rounded.abs() <= LARGEST
    for mark in marks.whole:
        found = found & (value != float(mark))
    for mark in filter(math.isfinite, marks.numbers):
        found = found & (rounded != float(np.float32(mark)))
    return found


def _scale(number: dict[str, Any]) -> tuple[float, float, float, float]:
    """Offset, divisor and limits of a number; see `scaled` of the formulas."""
    if "minmax" in number["transform"]:
        width = number["high"] - number["low"]
        return number["low"], width if width > 0 else 1.0, 0.0, 1.0
    deviation = number["deviation"]
    if "standard" in number["transform"]:
        return number["mean"], deviation if deviation > 0 else 1.0, -math.inf, math.inf
    return 0.0, 1.0, -math.inf, math.inf


def _buffers(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `stored_rows` as a `Field` looks them up."""
    first_order = stored["first_order"].unsqueeze(1)
    if "scale" not in stored:
        # One table is looked up faster than two.
        return {"table": torch.cat([stored["embedding"], first_order], 1)}
    scale = stored["scale"].unsqueeze(1)
    return {"table": stored["embedding"], "first_order": first_order, "scale": scale}


class Field(nn.Module):
    """A field's table, see `_buffers`, and how values of an input of its `kind` become rows."""

    def __init__(
        self,
        about: dict[str, Any],
        kind: str,
        table: dict[str, Tensor],
        missing: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.about, self.kind, self.marks = about, kind, values_of_marks(missing)
        for name in ("table", "first_order", "scale"):
            self.register_buffer(name, table.get(name))
        if kind == "number":
            self.register_buffer("edges", torch.tensor(about["edges"], dtype=torch.float64))

    def forward(self, value: Tensor, weights: Tensor | None = None) -> Tensor:
        """Embedding and first-order weight, `[samples, dim + 1]` float32.

        They are sums or means over several ids, each times its weight.
        """
        about = self.about
        if not about["multi"]:
            return self._weights(self._rows(value))
        rows, is_id = self.of_ids(value)
        if weights is not None:
            if about["missing_row"] is not None:
                ones = torch.ones(len(weights), 1, dtype=weights.dtype)
                weights = torch.cat([weights, ones], 1)
            # Padding may be anything.
            rows = torch.where(is_id.unsqueeze(-1), rows * weights.float().unsqueeze(-1), 0.0)
        sums = (rows * is_id.unsqueeze(-1)).sum(1)
        return (
            sums / is_id.sum(1, keepdim=True).clamp(min=1) if about["pooling"] == "mean" else sums
        )

    def of_ids(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The same of each id, `[samples, ids, dim + 1]`, and whether there is one at a place."""
        about = self.about
        # Leave out padding and ids beyond `max_ids`; add an id for a missing value.
        is_id = self._is_row(value)
        if about["max_ids"] is not None:
            place = is_id.cumsum(1)
            if about["keep"] == "last":
                place = is_id.sum(1, keepdim=True) - place + 1
            is_id = is_id & (place <= about["max_ids"])
        rows = torch.where(is_id, value, 0)
        if about["missing_row"] is not None:
            is_missing = is_id.sum(1, keepdim=True) == 0
            missing = torch.where(is_missing, about["missing_row"], 0)
            rows, is_id = torch.cat([rows, missing], 1), torch.cat([is_id, is_missing], 1)
        return self._weights(rows), is_id

    def _rows(self, value: Tensor) -> Tensor:
        """Rows of the values of samples with one each, `[samples]` int64."""
        about, missing = self.about, self.about["missing_row"]
        if self.kind == "text":
            return value
        if self.kind == "number":
            is_number = _is_number(value, self.marks)
            # The row for missing numbers comes before the buckets.
            row = (self.edges < _rounded(value).unsqueeze(1)).sum(1) + missing + 1
            return torch.where(is_number, row, missing)
        is_row = self._is_row(value)
        if about["encode"] == "hour_of_day":
            value = value % DAY // HOUR
        elif about["encode"] == "weekday":
            # Exported, `//` divides in float32, in which whole times are too coarse.
            value = (value % (WEEK * DAY) // DAY + THURSDAY) % WEEK
        # Without a row for missing values, use a row past the end, which the runtime refuses.
        return torch.where(is_row, value, about["rows"] if missing is None else missing)

    def _is_row(self, value: Tensor) -> Tensor:
        """Whether a whole number is a row of the table, an id of the log, or a time."""
        if self.kind == "seconds":
            return (value >= FIRST_TIME) & (value <= LAST_TIME)
        limit = self.about["size"] if self.kind == "integer" else self.about["rows"]
        found = (value >= 0) & (value < limit)
        for mark in self.marks.whole if self.kind == "integer" else ():
            if 0 <= mark < limit:
                found = found & (value != mark)
        return found

    def _weights(self, rows: Tensor) -> Tensor:
        """Embedding and first-order weight of rows, `[..., dim + 1]` float32."""
        found = functional.embedding(rows, self.table).float()
        if self.scale is None:
            return found
        found = found * functional.embedding(rows, self.scale)
        return torch.cat([found, functional.embedding(rows, self.first_order).float()], -1)


def _has_attention(program: ExportedProgram) -> bool:
    graphs = (part for part in program.graph_module.modules() if isinstance(part, GraphModule))
    return any(
        "scaled_dot_product" in str(node.target) for part in graphs for node in part.graph.nodes
    )


def translated(program: ExportedProgram) -> onnx.ModelProto:
    """A program as an ONNX model; the names of its values start with `inside/`.

    Raises:
        RunFolderError: torch.onnx cannot translate an operator; the message names it.
    """
    try:
        # Of the attention of torch itself, torch.onnx knows only that of four dimensions.
        if _has_attention(program):
            program = program.run_decompositions()
        found = torch.onnx.export(program, dynamo=True, opset_version=_OPSET, verbose=False)
        model = found.model_proto
    except torch.onnx.OnnxExporterError as failure:
        # The text has a line for the node: `call_function[target=torch.ops.NAME](args = ...`.
        node = re.search(r"\[target=(?:torch\.ops\.)?([\w.]+)\]", str(failure))
        raise RunFolderError(
            "the network cannot be written as ONNX: torch.onnx cannot translate "
            f"{node[1] if node else repr(failure.__cause__)}; use other torch functions in its "
            "forward, or leave out --format onnx"
        ) from failure
    graph = model.graph
    # Names of weights are given here: `compose` leaves them out in the branches of a condition.
    names = {weight.name: _INSIDE + weight.name for weight in graph.initializer}
    compose.add_prefix_graph(graph, _INSIDE, inplace=True, name_map=names)
    for node in graph.node:
        # They tell where the network's Python files are.
        node.ClearField("metadata_props")
    model.ir_version = _IR_VERSION
    opsets = {"": _OPSET, _LABEL_ENCODERS_DOMAIN: _LABEL_ENCODERS_OPSET}
    model.ClearField("opset_import")
    model.opset_import.extend(helper.make_opsetid(*opset) for opset in opsets.items())
    return model
