"""What packages refuse: damaged files, values they cannot use; only the loader's files run."""

import hashlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from stampede.engine.inference.package import load, update
from stampede.engine.inference.package.dense import Dense
from support.packages import loaded


@pytest.fixture
def package(packages, tmp_path):
    # Without what a process that loaded the original has left there.
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(packages / "int8", tmp_path / "package", ignore=ignored)


def refusal(package):
    """What load.py says; the package's path left out."""
    with pytest.raises(ValueError) as raised:
        load.load(package)
    said = str(raised.value)
    assert said.startswith(f"{package}: ") and "\n" not in said
    return said.removeprefix(f"{package}: ")


@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
def test_a_flipped_bit_is_found_in_every_file(package, place):
    names = [*json.loads((package / "package.json").read_text())["files"], "package.json"]
    assert {"encode.py", "formulas.py", "dense.json", "dense.safetensors"} < set(names)
    assert len(names) == sum(path.is_file() for path in package.rglob("*"))
    for name in names:
        content = bytearray((package / name).read_bytes())
        content[int(place * len(content))] ^= 1
        (package / name).write_bytes(content)
        said = refusal(package)
        assert name in said or name == "package.json", said
        content[int(place * len(content))] ^= 1
        (package / name).write_bytes(content)
    assert loaded(package)


def test_files_that_are_missing_or_cut(package):
    path = package / "tables/user.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    said = refusal(package)
    assert "cannot be used: tables/user.safetensors: " in said and " bytes instead of " in said
    path.unlink()
    assert "tables/user.safetensors: No such file or directory; copy the" in refusal(package)
    path = package / "package.json"
    path.write_text(path.read_text().replace('"epoch": 1', '"epoch": 2'))
    assert "package.json: its content has changed (SHA-256 differs)" in refusal(package)
    path.write_text('{"format": 1}')
    assert (
        "has format 1 and rules None, but this load.py reads 5 and 3; export it again"
        in refusal(package)
    )
    for text in (path.read_text()[:9], "{}"):
        path.write_text(text)
        assert "no exported model here (" in refusal(package)
    path.unlink()
    assert "no exported model here ([Errno 2] No such file" in refusal(package)


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def resealed(package):
    """Make `package.json` agree with the package's files, as somebody with bad intentions may."""
    about = json.loads((package / "package.json").read_text())
    about = {key: value for key, value in about.items() if key not in ("files", "sha256")}
    (package / "package.json").write_text(update.sealed(about, package))


def test_nothing_is_unpickled(package, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    bomb = pickle.dumps(Bomb(mark))
    # A bomb has no content to hash.
    monkeypatch.setattr(update, "content_digest", lambda path: "")
    for name in ("dense.json", "dense.safetensors", "tables/user.safetensors",
                 "vocabularies/user.parquet"):  # fmt: skip
        before = (package / name).read_bytes()
        (package / name).write_bytes(bomb)
        resealed(package)
        with pytest.raises(Exception):  # noqa: B017
            load.load(package)
        (package / name).write_bytes(before)
    assert not mark.exists()
    # The bomb works.
    pickle.loads(bomb)
    assert mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        "torch.os.system", "eval", "getattr", "save.default", "from_file.default",
        "set_.source_Storage", "as_strided.default", "resize_.default", "add.__class__", "add.out",
    ],
)  # fmt: skip
def test_a_graph_has_no_other_operators(package, tmp_path, name):
    path = package / "dense.json"
    graph = json.loads(path.read_text())
    graph["steps"][0] |= {"operator": name, "arguments": [f"touch {tmp_path}/mark"], "named": {}}
    path.write_text(json.dumps(graph))
    resealed(package)
    with pytest.raises(ValueError, match=f"packages do not support the operator '{name}'"):
        loaded(package)
    graph["steps"][0] |= {"operator": "relu.default", "arguments": [{"type": "os"}]}
    with pytest.raises(ValueError, match=r"packages do not support the argument {'type': 'os'}"):
        Dense(graph, {}, torch.device("cpu"))


@pytest.mark.parametrize("name", ["../theirs", "/etc/hostname", "a/../../theirs", ".hidden", ""])
def test_files_outside_of_the_package_are_not_read(package, name):
    about = json.loads((package / "package.json").read_text())
    entry = {"bytes": 1, "sha256": "0"}
    seal(package, {**about, "files": {**about["files"], name: entry}})
    assert f"package.json: {name!r} is not a file of a package" in refusal(package)
    seal(package, {**about, "files": {**about["files"], "dense.json": {"bytes": "x"}}})
    assert "'dense.json' is not a file of a package" in refusal(package)


def seal(package, about):
    """Write a description with its own SHA-256."""
    text = json.dumps({**about, "sha256": ""}) + "\n"
    before, key, after = text.rpartition('"sha256": "')
    digest = hashlib.sha256(text.encode()).hexdigest()
    (package / "package.json").write_text(before + key + digest + after)


def test_a_package_of_other_rules_is_refused(package):
    """An older version read values in another way, see `rules` of the schema."""
    about = json.loads((package / "package.json").read_text())
    seal(package, {**about, "rules": 2})
    assert "has format 5 and rules 2, but this load.py reads 5 and 3; export" in refusal(package)


def test_links_out_of_the_package_are_not_followed(package, tmp_path):
    path = package / "dense.json"
    os.replace(path, tmp_path / "theirs")
    path.symlink_to(tmp_path / "theirs")
    assert "dense.json: is a link out of the package" in refusal(package)
    # A store of files by their digest, as some tools keep it, is inside.
    path.unlink()
    (package / "blobs").mkdir()
    os.replace(tmp_path / "theirs", package / "blobs/1")
    path.symlink_to("blobs/1")
    assert loaded(package)


def test_pipes_and_large_files_do_not_hang(package, monkeypatch):
    for name in ("dense.json", "package.json"):
        (package / name).unlink()
        os.mkfifo(package / name)
        assert "is not a file" in refusal(package) or "Invalid argument" in refusal(package)
        (package / name).unlink()
        (package / name).write_text("{}")
    monkeypatch.setattr(load, "_MOST_BYTES", 1)
    assert "package.json has more than 1 bytes" in refusal(package)


@pytest.mark.parametrize(
    "change",
    [
        {"fields": None}, {"fields": [1]}, {"numbers": "x"}, {"fields": [{"name": "user"}]},
        {"files": None}, {"time": 5},
    ],
)  # fmt: skip
def test_a_description_of_wrong_types_gets_a_sentence(package, change):
    about = json.loads((package / "package.json").read_text())
    seal(package, {**about, **change})
    refusal(package)
    for text in ("[]", "null", '{"format": 1e400}', '{"format": "\\u001b[31m"}', "5"):
        (package / "package.json").write_text(text)
        assert "\x1b" not in refusal(package)


def test_a_graph_cannot_end_the_process(tmp_path):
    smallest = {"name": "low", "operator": "full.default", "arguments": [[1], -(2**63)],
                "named": {"dtype": {"type": "int64"}}}  # fmt: skip
    for name, named in (
        ("floor_divide.default", {}), ("remainder.Scalar", {}), ("floor_divide_.Tensor", {}),
        ("div.Tensor_mode", {"rounding_mode": "trunc"}),
    ):  # fmt: skip
        other = {"name": "one", "operator": "full.default", "arguments": [[1], -1],
                 "named": {"dtype": {"type": "int64"}}}  # fmt: skip
        by = -1 if name.endswith("Scalar") else {"value": "one"}
        last = {"name": "end", "operator": name, "arguments": [{"value": "low"}, by],
                "named": named}  # fmt: skip
        graph = {"steps": [smallest, other, last], "output": "end", "trained": []}
        dense = Dense(graph, {}, torch.device("cpu"))
        with pytest.raises(ValueError, match="packages do not divide whole numbers"):
            dense(torch.ones(1), torch.ones(1))
        last["arguments"] = [{"value": "rows"}, by]
        dense = Dense({**graph, "steps": [smallest, other, last]}, {}, torch.device("cpu"))
        assert dense(torch.ones(1), torch.ones(1)) in (-1, 0)
    # Nor read beyond its values.
    counts = {"lengths": {"value": "numbers"}, "initial": 0.0}
    for given, more in ((1, {}), (2, {}), (1, {"unsafe": True}), (1, {"offsets": None})):
        step = {"name": "end", "operator": "segment_reduce.default",
                "arguments": [{"value": "rows"}, "sum"], "named": {**counts, **more}}  # fmt: skip
        dense = Dense({"steps": [step], "output": "end", "trained": []}, {}, torch.device("cpu"))
        if (given, more) == (1, {}):
            assert dense(torch.ones(1), torch.tensor([given])) == 1
            continue
        with pytest.raises((RuntimeError, TypeError)):
            dense(torch.ones(1), torch.tensor([given]))


GOOD = {
    "user": ["1"], "movie": ["2"], "genres": ["war"], "city": ["Oslo"], "slot": [3], "age": [30],
    "when": ["2024-03-01 12:00:00"],
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"slot": [12]}, "column slot: found 12; write whole numbers from 0 to 11"),
        ({"slot": ["a"]}, "column slot: found 'a'; write whole numbers"),
        ({"age": ["old"]}, "column age: found 'old'; write a finite number"),
        ({"age": ["1.234,56"]}, "column age: found '1.234,56'; write 1234.56, with a point before"),
        ({"age": [float("inf")]}, "column age: found inf; write a finite number"),
        ({"when": ["yesterday"]}, "found 'yesterday'; write a time in 1990 to 2099 as %Y-%m-%d"),
        ({"when": [1772668806000]}, "in the schema, which fits it"),
        (
            {"when": ["2026-03-05T00:00:00"]},
            "{column: when, format: '%Y-%m-%dT%H:%M:%S'}",
        ),
        ({"when": [None]}, '%H:%M:%S (or on_bad_value="missing" to treat it as missing)'),
        ({"user": [["1", "2"]]}, "column user: found lists; write one id per sample"),
        ({"city": ["Oslo", "Paris"]}, "columns of different lengths"),
        ({"user": [1e17]}, "column user: found 1e+17; a float cannot tell ids of this size apart"),
        ({"genres": [[1e17]]}, "column genres: found 1e+17; a float cannot tell ids of this size"),
        ({"genres": ["war", ["drama"]]}, "column genres: found lists and single values"),
        ({"user": "68fd1e64"}, "column user: found '68fd1e64'; write a list"),
        ({"user": [object]}, "write text, numbers or lists"),
    ],
)
def test_values_that_cannot_be_used(packages, changes, words):
    model = loaded(packages / "fp32")
    assert model.score(GOOD).shape == (1,)
    with pytest.raises(ValueError, match=re.escape(words)):
        model.score({**GOOD, **changes})


def test_missing_values_of_pandas_types(packages):
    model = loaded(packages / "fp32")
    for name in ("age", "slot", "user"):
        found = [model.logits({**GOOD, name: [one]})[0] for one in (pd.NA, None)]
        assert found[0] == found[1] != model.logits(GOOD)[0]


def test_samples_that_are_no_mappings(packages):
    model = loaded(packages / "fp32")
    words = r"found the sample \['1'\]; write each sample as a mapping"
    with pytest.raises(ValueError, match=words):
        model.score([["1"]])
    with pytest.raises(ValueError, match="batch_size: found 0; write a number of at least 1"):
        model.score(GOOD, batch_size=0)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("genres", [1, 1], "lengths of genres: their sum is 2, but there are 3 ids"),
        ("genres", [4, -1], "lengths of genres: found -1; write 0 or more"),
        ("genres", [2.0, 1.0], "lengths of genres: found [2] float64; write whole numbers, [n]"),
        ("numbers", [[float("nan")], [0]], "numbers: write finite numbers, transformed, [n, 1]"),
        ("numbers", [0.5, 0.25], "numbers: write finite numbers, transformed, [n, 1]"),
        ("numbers", [[0.5]], "found [1, 2] samples; write equal numbers"),
        ("user", [1.0, 2.0], "user: found [2] float64; write whole numbers, [n]"),
        ("user", [1, 10**6], "field user: an id is not a row from 0 to"),
        ("user", None, "no ids of 'user'; the fields are user, movie"),
    ],
)
def test_rows_of_tables_that_cannot_be_used(packages, name, value, words):
    model = loaded(packages / "fp32")
    ids = {name: [1, 2] for name in model.fields} | {"genres": [1, 2, 3]}
    given = {"ids": ids, "lengths": {"genres": [2, 1]}, "numbers": [[0.5], [0.25]]}
    assert model.score_rows(**given).shape == (2,)
    if name == "numbers":
        given[name] = value
    elif value is None:
        del ids[name]
    else:
        given["lengths" if name == "genres" else "ids"][name] = value
    with pytest.raises(ValueError, match=re.escape(words)):
        model.score_rows(**given)
