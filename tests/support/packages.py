"""Exported packages, loaded in this process or where stampede cannot be imported."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import torch

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
    """Logits of each of some inputs, computed by a process without stampede or warnings."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", _ALONE, str(package)],
        input=json.dumps(inputs),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout)


def loaded(package, *folder):
    """The package's model, or that of another `folder`, by its own load.py."""
    spec = importlib.util.spec_from_file_location("load_of_a_package", package / "load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(*folder)


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


def onnx_inputs(session, columns, package):
    """What a session takes for columns of a log: text, with several ids as JSON or between `|`.

    Args:
        package: the run's model, which computes rows of tables.
    """
    found = {}
    for one in json.loads(session.get_modelmeta().custom_metadata_map["inputs"]):
        values = columns[one["column"]]
        if one["kind"] == "row":
            values = package._encoder.rows(columns, one["fields"])[one["fields"][0]]
        elif one["kind"] == "number":
            values = np.array(values, float)
        elif one["multi"]:
            split = [json.loads(v) if v[:1] == "[" else v.split("|") if v else [] for v in values]
            most = max(map(len, split))
            if one["kind"] == "weights":
                # That of a missing id is not used.
                cells = [[7.0 if x == "" else float(x) for x in cell] for cell in split]
                values = np.array([cell + [1.0] * (most - len(cell)) for cell in cells])
            else:
                values = np.array([cell + [""] * (most - len(cell)) for cell in split], object)
        else:
            values = np.array(values, object)
        found[one["name"]] = values
    return found
