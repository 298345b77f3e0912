"""Exported packages and files of ONNX, loaded here or where stampede cannot be imported."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import torch
from onnx import TensorProto
from onnx.checker import check_model
from onnx.helper import make_tensor_value_info
from onnxruntime import InferenceSession

from stampede.engine.inference.onnx_graph import Graph
from stampede.engine.inference.onnx_operators import add_program
from stampede.engine.inference.trained import open_trained
from stampede.engine.reading import open_dataset
from support.waiting import HANG

# Scores what the standard input says, with nothing of stampede and what it trains with.
_ALONE = """
import json, sys

HIDDEN = {"stampede", "torchrec", "fbgemm_gpu"}

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"hidden: {name}", name=name)

sys.meta_path.insert(0, Hidden())
try:
    import stampede
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("stampede is not hidden")

sys.path.insert(0, sys.argv[1])
from load import load

model = load()
found = [model.logits(samples).tolist() for samples in json.load(sys.stdin)]
assert not HIDDEN & set(sys.modules), HIDDEN & set(sys.modules)
print(json.dumps(found))
"""


def logits_alone(package, inputs, cwd):
    """Logits of each of some inputs, computed by a process without stampede."""
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, str(package)],
        input=json.dumps(inputs),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def loaded(package):
    """The package's model, by its own load.py."""
    spec = importlib.util.spec_from_file_location("load_of_a_package", package / "load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load()


def columns_of(frame):
    """Values by column as JSON has them: text, numbers, and None where a number is missing."""
    return {
        name: [None if value != value else value for value in frame[name].tolist()]
        for name in frame
    }


def open_test_part(run):
    """The first rows of the test part of a run on synthetic clicks."""
    trained = open_trained(run, allow_import=True)
    return open_dataset(trained.config, None).test.read(torch.arange(50))


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


def dense_session(program, numbers, output=("n",)):
    """The dense part of a model, see `export_dense_part`, in onnxruntime: rows and numbers.

    Args:
        output: shape of what comes out.
    """
    graph = Graph()
    for name, dims in (("rows", ["n", None, None]), ("numbers", ["n", numbers])):
        found = make_tensor_value_info(graph.name(name), TensorProto.FLOAT, dims)
        graph.model.graph.input.append(found)
    logit = add_program(graph, program, ["rows", "numbers"])
    graph.model.graph.output.append(make_tensor_value_info(logit, TensorProto.FLOAT, output))
    graph.model.graph.name = "dense"
    check_model(graph.model, full_check=True)
    return onnx_session(graph.model.SerializeToString())
