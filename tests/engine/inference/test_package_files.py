"""Packages that are damaged, or that somebody made to harm: refused in a sentence, nothing runs."""

import hashlib
import json
import os
import pickle
import shutil

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from stampede.engine.inference.package.dense import Dense
from support.packages import loaded


@pytest.fixture
def package(packages, tmp_path):
    return shutil.copytree(packages / "int8", tmp_path / "package")


def refusal(package):
    """What load.py says; the package's path left out."""
    with pytest.raises(ValueError) as raised:
        loaded(package)
    said = str(raised.value)
    assert said.startswith(f"{package}: ") and "\n" not in said
    return said.removeprefix(f"{package}: ")


def sealed(package, **changes):
    """`package.json` made to agree with all files, as who wants to harm would."""
    path = package / "package.json"
    about = {**json.loads(path.read_text()), **changes, "sha256": ""}
    for name, entry in about["files"].items():
        if (package / name).is_file():
            content = (package / name).read_bytes()
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    about["sha256"] = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    path.write_text(json.dumps(about))


def test_a_sealed_package_is_read(package):
    sealed(package, epoch=7)
    assert loaded(package).about["epoch"] == 7


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.999])
def test_a_flipped_bit_is_found_in_every_file(package, place):
    names = [*json.loads((package / "package.json").read_text())["files"], "package.json"]
    assert {"encode.py", "formulas.py", "dense.json", "dense.safetensors"} < set(names)
    assert len(names) == sum(path.is_file() for path in package.rglob("*"))
    for name in names:
        # Python itself reads load.py; the first lines of it are text.
        content = bytearray((package / name).read_bytes())
        at = 10 if name == "load.py" else int(place * len(content))
        content[at] ^= 1
        (package / name).write_bytes(content)
        said = refusal(package)
        assert name in said or name == "package.json", said
        content[at] ^= 1
        (package / name).write_bytes(content)
    assert loaded(package)


def test_a_value_that_was_changed_in_package_json(package):
    path = package / "package.json"
    text = path.read_text()
    path.write_text(text.replace('"epoch": 1', '"epoch": 2'))
    assert refusal(package) == (
        "the package cannot be used: package.json: its content has changed (SHA-256 differs)"
    )


def test_packages_of_another_format(package):
    path = package / "package.json"
    for found, words in (
        (
            '{"format": 1}',
            "the package has format 1, but this load.py reads 2; export it again with: stampede",
        ),
        ("[]", "the package has format None, but"),
        ("[" * 100_000, "no exported model here (maximum recursion depth"),
        ("1" * 10_000, "no exported model here (Exceeds the limit"),
        (" " * (2**26 + 1), "no exported model here (package.json has more than 67,108,864 bytes)"),
    ):
        path.write_text(found)
        assert words in refusal(package)
    path.unlink()
    os.mkfifo(path)
    assert "no exported model here ([Errno 22] is not a file" in refusal(package)


def make_link(path):
    shutil.move(path, path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def make_folder_a_link(path):
    shutil.move(path.parent, path.parents[2] / "elsewhere")
    path.parent.symlink_to(path.parents[2] / "elsewhere")


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def make_longer(path):
    with path.open("ab") as file:
        file.write(b" ")


@pytest.mark.parametrize(
    "tamper, words",
    [
        (make_link, "a link that leads out of the package"),
        (make_folder_a_link, "a link that leads out of the package"),
        (make_pipe, "is not a file"),
        (make_longer, " bytes instead of "),
        (lambda path: path.unlink(), "No such file or directory"),
    ],
)
def test_files_that_are_not_the_packages(package, tamper, words):
    tamper(package / "tables/user.safetensors")
    said = refusal(package)
    assert said.startswith("the package cannot be used: tables/") and words in said


def test_names_that_lead_out_of_the_package(package, tmp_path):
    shutil.copy(package / "tables/user.safetensors", tmp_path / "x.safetensors")
    about = json.loads((package / "package.json").read_text())
    entry = about["files"]["tables/user.safetensors"]
    for name in ("../x.safetensors", str(tmp_path / "x.safetensors"), "tables/../x", "a/b/c", ""):
        sealed(package, files={**about["files"], name: entry})
        assert "not a file name of a package" in refusal(package)
    about["fields"][0]["name"] = "../../x"
    sealed(package, **about)
    assert "package.json: does not list tables/../../x.safetensors" in refusal(package)


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_nothing_is_unpickled(package, tmp_path):
    mark = tmp_path / "mark"
    bomb = pickle.dumps(Bomb(mark))
    torch.save(Bomb(mark), package / "dense.pt2")
    loaded(package)
    names = list(json.loads((package / "package.json").read_text())["files"])
    for name in [name for name in names if not name.endswith(".py")]:
        before = (package / name).read_bytes()
        for content in (bomb, (package / "dense.pt2").read_bytes()):
            (package / name).write_bytes(content)
            sealed(package)
            assert refusal(package).startswith("the package cannot be used: ")
        (package / name).write_bytes(before)
    assert not mark.exists()
    # The bomb is one.
    pickle.loads(bomb)
    assert mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        "torch.os.system", "os.system", "builtins.eval", "eval", "system", "getattr", "attrgetter",
        "save.default", "from_file.default", "set_.source_Storage", "as_strided.default",
        "_unsafe_index.Tensor", "resize_.default", "embedding_dense_backward.default",
        "add.__class__", "add.overloads", "add._op", "add", "__class__.__init__", "linear",
        "add.out",
    ],
)  # fmt: skip
def test_a_graph_has_no_other_operators(package, tmp_path, name):
    path = package / "dense.json"
    graph = json.loads(path.read_text())
    graph["steps"][0] |= {"operator": name, "arguments": [f"touch {tmp_path}/mark"], "named": {}}
    path.write_text(json.dumps(graph))
    sealed(package)
    said = refusal(package)
    if name != "add":
        assert said == (
            f"the package cannot be used: step 0: packages do not support the operator {name!r}"
        )
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"arguments": [{"type": "os"}]},
            "step 0: packages do not support the argument {'type': 'os'}",
        ),
        (
            {"arguments": [{"weight": "x"}]},
            "step 0: packages do not support the argument {'weight': 'x'}",
        ),
        ({"arguments": [{"value": "later"}]}, "step 0: 'later' has no value yet"),
        ({"arguments": [{}]}, "step 0: "),
        ({"arguments": None}, "step 0: "),
        ({"name": "rows"}, "step 0: 'rows' already has a value"),
        ({"name": ["x"]}, "step 0: "),
        ({"operator": 1}, "step 0: "),
        ({"operator": "mul", "arguments": ["x", 9]}, "mul takes sizes"),
        ({"operator": "mul", "arguments": [2**62, 2]}, "which is not a size"),
        (
            {"operator": "getitem", "arguments": ["x", 0]},
            "getitem needs a step with several results",
        ),
        ({"operator": "linear.default", "arguments": ["x"]}, "aten::linear()"),
        ({"operator": "relu.default", "arguments": [{"value": "numbers"}]}, ""),
    ],
)
def test_a_graph_that_makes_no_sense(package, changes, words):
    path = package / "dense.json"
    graph = json.loads(path.read_text())
    graph["steps"][0] |= {"named": {}, **changes}
    path.write_text(json.dumps(graph))
    sealed(package)
    said = refusal(package)
    assert said.startswith("the package cannot be used: ") and words in said


def test_an_output_that_is_no_logit(package):
    path = package / "dense.json"
    graph = json.loads(path.read_text())
    for output, words in (("numbers", "two samples have logits [2, 1]"), ("x", "no step is named")):
        path.write_text(json.dumps({**graph, "output": output}))
        sealed(package)
        assert words in refusal(package)


@pytest.mark.parametrize("key", ["fields", "numbers", "dim", "rows", "files", "sha256"])
def test_a_package_json_that_makes_no_sense(package, key):
    path = package / "package.json"
    about = json.loads(path.read_text())
    for value in (None, 7, [7], {"a": 7}):
        if key in ("files", "sha256"):
            path.write_text(json.dumps({**about, key: value}))
        else:
            sealed(package, **{**about, key: value})
        assert refusal(package).startswith("the package cannot be used: ")


def test_a_table_of_another_shape(package):
    path = package / "tables/user.safetensors"
    table = load_file(path)
    table["embedding"] = table["embedding"][1:].clone()
    save_file(table, path)
    sealed(package)
    assert "tables/user.safetensors: found {" in refusal(package)


def test_a_vocabulary_that_unpacks_to_more_than_its_table(package):
    path = package / "vocabularies/user.parquet"
    pl.DataFrame({"value": ["x"] * 3_000_000}).write_parquet(path)
    assert path.stat().st_size < 10_000
    sealed(package)
    assert "user.parquet: 3,000,000 ids, but the table has " in refusal(package)


def test_values_are_freed_when_no_later_step_needs_them():
    """A chain of steps takes the memory of a few of them."""
    steps = [
        {"name": f"s{i}", "operator": "add.Tensor", "arguments": [{"value": f"s{i - 1}"}, 1]}
        for i in range(1, 5)
    ]
    steps[0]["arguments"] = [{"value": "rows"}, {"value": "numbers"}]
    dense = Dense({"steps": steps, "output": "s4", "trained": []}, {}, torch.device("cpu"))
    assert [step.done_with for step in dense._steps] == [
        {"rows", "numbers"}, {"s1"}, {"s2"}, {"s3"},
    ]  # fmt: skip
    assert dense(torch.ones(2), torch.ones(2)).tolist() == [5, 5]
