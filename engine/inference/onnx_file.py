"""Export as one ONNX file: from columns of the log to the probability of a click."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from stampede.data.formulas import DAY, HOUR, THURSDAY, WEEK
from stampede.data.learning.row_meanings import RowMeanings, row_meanings
from stampede.data.learning.vocabulary import FIRST_ROW
from stampede.data.raw.log import LARGEST
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.kept import inputs_folder, remedy
from stampede.engine.inference.onnx_operators import LABEL_ENCODERS_DOMAIN, Graph, add_program
from stampede.engine.inference.packaging import (
    RowType,
    described_model,
    export_dense_part,
    stored_rows,
)
from stampede.engine.inference.trained import Trained, dense_model
from stampede.engine.tables import read_stored_field
from stampede.files import new_file, to_json

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

_SAMPLES = "samples"


def export_onnx(
    trained: Trained, path: Path, rows: RowType, overwrite: bool, most_ids: int = MOST_IDS
) -> dict[str, Any]:
    """Write an ONNX file; it appears once it is complete.

    Args:
        trained: the model.
        path: ends in `.onnx`.
        rows: how tables are stored, see `stored_rows`; the file computes in float32.
        overwrite: whether an existing file is replaced.
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
    try:
        if path.is_dir():
            raise RunFolderError(f"{path}: is a folder; write the name of a file")
        if path.exists() and not overwrite:
            raise RunFolderError(f"{path}: already exists; write --overwrite, or another name")
        model, about = _model(trained, rows, most_ids)
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as unfinished:
            unfinished.write_bytes(model.SerializeToString())
    except OSError as failure:
        raise RunFolderError(
            f"{path}: cannot be written ({failure.strerror or failure}); make room, or write "
            "another file"
        ) from None
    return about


def _model(trained: Trained, rows: RowType, most_ids: int) -> tuple[onnx.ModelProto, dict]:
    kept = inputs_folder(trained.config, trained.run)
    about = described_model(trained, kept, rows)
    meanings = {} if kept is None else row_meanings(kept, remedy(kept))
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
    logit = add_program(graph, export_dense_part(dense_model(trained)), values)
    for name, value in ((PROBABILITY, graph.add("Sigmoid", logit)), (LOGIT, logit)):
        graph.model.graph.node.append(helper.make_node("Identity", [value], [name]))
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


class Inputs:
    """The graph from raw columns to looked-up rows and numbers.

    Attributes:
        graph: the graph to add the inputs to.
        described: of each input its `name`, `column`, `kind` (text, integer, number, seconds, or
            or row, of the field's table), whether it is `[samples, ids]` (`multi`), and `fields`.

    Args:
        about: see `described_model`.
        meanings: of the fields.
        most_ids: see `export_onnx`.
    """

    def __init__(
        self, about: dict[str, Any], meanings: dict[str, RowMeanings], most_ids: int
    ) -> None:
        self.graph = Graph()
        self.described: list[dict[str, Any]] = []
        self._about, self._meanings, self._most_ids = about, meanings, most_ids
        self._inputs: dict[tuple[str, str, bool], int] = {}
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
            self._inputs[key] = len(self.described)
            name = self.graph.name(key[0])
            described = {"name": name, "column": column, "kind": kind, "multi": multi, "fields": []}
            self.described.append(described)
            types = {"number": onnx.TensorProto.DOUBLE, "text": onnx.TensorProto.STRING}
            shape = [_SAMPLES, f"ids of {name}"] if multi else [_SAMPLES]
            found = types.get(kind, onnx.TensorProto.INT64)
            self.graph.model.graph.input.append(helper.make_tensor_value_info(name, found, shape))
        described = self.described[self._inputs[key]]
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

    def numbers(self, rows: str) -> str:
        """The network's numbers, `[samples, numbers]` float32.

        Args:
            rows: any value with one entry per sample.
        """
        add, constant = self.graph.add, self.graph.constant
        wanted = self._about["numbers"]
        if not wanted:
            samples = add("Slice", add("Shape", rows), *(constant([x], np.int64) for x in (0, 1)))
            shape = add("Concat", samples, constant([0], np.int64), axis=0)
            return add("ConstantOfShape", shape)
        columns = add("Concat", *(self._input(one, "number") for one in wanted), axis=0)
        shape = constant([len(wanted), -1], np.int64)
        given = add("Transpose", add("Reshape", columns, shape), perm=[1, 0])
        fills = constant([one["fill"] for one in wanted], np.float64)
        value = add("Where", self._is_number(given), given, fills)
        logged = ["log1p" in one["transform"] for one in wanted]
        if any(logged):
            positive = add("Max", value, constant(0, np.float64))
            logs = add("Log", add("Add", positive, constant(1, np.float64)))
            value = add("Where", constant(logged, np.bool_), logs, value)
        scales = zip(*map(_scale, wanted), strict=True)
        for kind, numbers in zip(("Sub", "Div", "Max", "Min"), scales, strict=True):
            value = add(kind, value, constant(numbers, np.float64))
        narrow = self.graph.cast(value, np.dtype(self._about["numbers_dtype"]).type)
        return self.graph.cast(narrow, np.float32)

    def _is_number(self, value: str) -> str:
        """Whether a value is present; one too large for float32 counts as missing."""
        size = self.graph.add("Abs", value)
        return self.graph.add("LessOrEqual", size, self.graph.constant(LARGEST, np.float64))

    def looked_up(self, field: dict[str, Any], table: dict[str, np.ndarray]) -> str:
        """Embedding and first-order weight of a field, `[samples, dim + 1]` float32.

        Args:
            table: see `stored_rows`.
        """
        add, constant = self.graph.add, self.graph.constant
        rows = self._rows(field)
        if not field["multi"]:
            return self._weights(table, rows)
        # Mask padding, cut to `max_ids`, and add an id for a missing value.
        is_id = self._is_row(rows, field)
        if field["max_ids"] is not None:
            places = add("CumSum", self.graph.cast(is_id, np.int64), constant(1, np.int64))
            most = constant(field["max_ids"], np.int64)
            is_id = add("And", is_id, add("LessOrEqual", places, most))
        rows = add("Where", is_id, rows, constant(0, np.int64))
        if field["missing_row"] is not None:
            axis = constant([1], np.int64)
            count = add("ReduceSum", self.graph.cast(is_id, np.int64), axis, keepdims=1)
            is_missing = add("Equal", count, constant(0, np.int64))
            values = (constant(field["missing_row"], np.int64), constant(0, np.int64))
            rows = add("Concat", rows, add("Where", is_missing, *values), axis=1)
            is_id = add("Concat", is_id, is_missing, axis=1)
        axis = constant([-1], np.int64)
        shares = add("Unsqueeze", self.graph.cast(is_id, np.float32), axis)
        weights = add("Mul", self._weights(table, rows), shares)
        return add("ReduceSum", weights, constant([1], np.int64), keepdims=0)

    def _rows(self, field: dict[str, Any]) -> str:
        """Rows of a field's table, int64; in fields with several ids, non-rows are padding."""
        add, constant = self.graph.add, self.graph.constant
        kind, value = self._kind(field), self._input(field)
        if kind == "text":
            return self._rows_of_texts(field, value)
        if kind == "number":
            one = constant([1], np.int64)
            below = add("Less", constant(field["edges"], np.float64), add("Unsqueeze", value, one))
            count = add("ReduceSum", self.graph.cast(below, np.int64), one, keepdims=0)
            # The row for missing numbers comes before the buckets.
            missing = constant(field["missing_row"], np.int64)
            row = add("Add", add("Add", count, missing), constant(1, np.int64))
            return add("Where", self._is_number(value), row, missing)
        if field["multi"]:
            return value
        # Without a row for missing values, use a row past the end, which the runtime refuses.
        missing = field["rows"] if field["missing_row"] is None else field["missing_row"]
        is_row = self._is_row(value, field)
        if kind == "seconds":
            value = self._part_of_time(field["encode"], value)
        return add("Where", is_row, value, constant(missing, np.int64))

    def _rows_of_texts(self, field: dict[str, Any], value: str) -> str:
        """Rows of ids of a vocabulary; in fields with several ids, missing ones are -1."""
        missing = -1 if field["multi"] else field["missing_row"]
        texts = self._meanings[field["name"]].values().to_list()
        rows = dict(zip(texts, range(FIRST_ROW, FIRST_ROW + len(texts)), strict=True))
        rows |= dict.fromkeys(self._about["missing"], missing)
        if field["multi"]:
            rows[""] = missing
        self.graph.take(sum(len(text.encode()) + _BYTES_BESIDES for text in rows))
        return self.graph.add(
            "LabelEncoder",
            value,
            domain=LABEL_ENCODERS_DOMAIN,
            keys_strings=list(rows),
            values_int64s=list(rows.values()),
            default_int64=field["unseen_row"],
        )

    def _is_row(self, value: str, field: dict[str, Any]) -> str:
        """Whether a whole number is a row of the table, an id of the log, or a time."""
        add, kind = self.graph.add, self._kind(field)
        is_row = add("GreaterOrEqual", value, self.graph.constant(0, np.int64))
        if kind == "seconds":
            return is_row
        limit = field["size"] if kind == "integer" else field["rows"]
        return add("And", is_row, add("Less", value, self.graph.constant(limit, np.int64)))

    def _part_of_time(self, part: str, seconds: str) -> str:
        """See `part_of_time` of `stampede.data.formulas`; undefined before 1970."""
        add = self.graph.add

        def number(value: int) -> str:
            return self.graph.constant(value, np.int64)

        if part == "hour_of_day":
            return add("Div", add("Mod", seconds, number(DAY)), number(HOUR))
        days = add("Add", add("Div", seconds, number(DAY)), number(THURSDAY))
        return add("Mod", days, number(WEEK))

    def _weights(self, table: dict[str, np.ndarray], rows: str) -> str:
        """Embedding and first-order weight of rows, `[..., dim + 1]` float32."""
        add, constant = self.graph.add, self.graph.constant
        first_order = table["first_order"][:, None]
        if "scale" not in table:
            whole = np.concatenate([table["embedding"], first_order], 1)
            return self.graph.cast(add("Gather", constant(whole), rows), np.float32)
        parts = {"embedding": table["embedding"], "scale": table["scale"][:, None]}
        embedding, scale, weight = (
            self.graph.cast(add("Gather", constant(part), rows), np.float32)
            for part in (*parts.values(), first_order)
        )
        return add("Concat", add("Mul", embedding, scale), weight, axis=-1)


def _scale(number: dict[str, Any]) -> tuple[float, float, float, float]:
    """Offset, divisor and limits of a number; see `scaled` of the formulas."""
    if "minmax" in number["transform"]:
        width = number["high"] - number["low"]
        return number["low"], width if width > 0 else 1.0, 0.0, 1.0
    deviation = number["deviation"]
    if "standard" in number["transform"]:
        return number["mean"], deviation if deviation > 0 else 1.0, -np.inf, np.inf
    return 0.0, 1.0, -np.inf, np.inf
