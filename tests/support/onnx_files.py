"""Files of ONNX in onnxruntime, and what they take for columns of a log."""

import json

import numpy as np
import pandas as pd
import torch
from onnx.checker import check_model
from onnxruntime import InferenceSession

from stampede.engine.inference.onnx_file import translated


def onnx_session(model):
    """A file of ONNX, or its bytes, in onnxruntime."""
    return InferenceSession(
        model if isinstance(model, bytes) else str(model), providers=["CPUExecutionProvider"]
    )


def onnx_inputs(session, columns, rows):
    """What a session takes for columns of a log.

    Args:
        columns: values by column; lists, or None, where a sample may have several ids.
        rows: of fields' tables, by field.
    """
    found = {}
    for one in json.loads(session.get_modelmeta().custom_metadata_map["inputs"]):
        if one["kind"] == "row":
            found[one["name"]] = rows[one["fields"][0]]
            continue
        kind, missing = (object, "") if one["kind"] == "text" else (np.int64, -1)
        values = columns[one["column"]]
        if one["kind"] == "number":
            numbers = pd.to_numeric(pd.Series(values, dtype=object), errors="coerce")
            found[one["name"]] = numbers.to_numpy(float)
        elif one["multi"]:
            values = [value or [] for value in values]
            most = max(map(len, values), default=0)
            values = [value + [missing] * (most - len(value)) for value in values]
            found[one["name"]] = np.array(values, dtype=kind).reshape(len(values), most)
        else:
            values = [missing if value is None else value for value in values]
            found[one["name"]] = np.array(values, dtype=kind)
    return found


def dense_in_onnx(program):
    """The dense part of a model, see `export_dense_part`, as a function that onnxruntime computes.

    It takes rows of tables and numbers; a network may leave one of them out.
    """
    model = translated(program)
    check_model(model, full_check=True)
    session = onnx_session(model.SerializeToString())
    taken = {one.name for one in session.get_inputs()}

    def computed(rows, numbers):
        given = {"inside/rows": rows.numpy(), "inside/numbers": numbers.numpy()}
        return torch.from_numpy(
            session.run(None, {k: v for k, v in given.items() if k in taken})[0]
        )

    return computed
