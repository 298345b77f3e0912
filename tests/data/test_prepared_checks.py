"""What is wrong with a manifest or inside the files of a prepared folder."""

import json

import numpy as np
import pytest
import torch

from stampede.data import DataError
from stampede.data.prepared import arrays as contents
from stampede.data.prepared.manifest import read_manifest
from stampede.data.prepared.reader import open_prepared
from stampede.data.prepared.verify import verify
from support.prepared import drawn_fields, drawn_rows, write_array, write_prepared, write_small


@pytest.mark.parametrize("name", ["a.b", "", "a/b", "é", "-a", "a\n"])
def test_names_that_the_schema_refuses_are_refused(tmp_path, name):
    folder = write_prepared(
        tmp_path / "data", {"train": drawn_rows(4), "test": drawn_rows(4)}, drawn_fields()
    )
    text = (folder / "manifest.json").read_text()
    for old in ("C1", "I1"):
        manifest = text.replace(json.dumps(old), json.dumps(name))
        assert manifest != text
        (folder / "manifest.json").write_text(manifest)
        with pytest.raises(DataError, match=r"manifest.json: damaged.*(fields|numbers)\.0"):
            read_manifest(folder)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "./../x", "..", ".", "a//x", "a/b/c", "x\n", "~/x"]
)
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, name):
    folder = write_small(tmp_path / "data")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parts"]["test"][0]["files"]["ids"]["name"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        DataError, match=r"parts.test.0.files.ids.name.*not the name of a file in this"
    ):
        read_manifest(folder)


def test_what_is_wrong_is_told_in_short(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"x" * 100_000: 1}))
    with pytest.raises(DataError) as refusal:
        read_manifest(tmp_path)
    assert len(str(refusal.value)) < 5000


@pytest.fixture
def folder(tmp_path):
    return write_small(tmp_path / "data")


def test_verify_finds_a_single_bit(folder):
    verify(folder)
    path = folder / "test-0-values_1.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    gone = folder / "validation-0-label.npy"
    gone.unlink()
    with pytest.raises(DataError) as refusal:
        verify(folder)
    text = str(refusal.value)
    assert "2 of " in text
    assert f"{path}: its content has changed" in text and f"{gone}: No such file" in text


def test_verify_reads_what_was_learned(folder):
    learned = folder / "learned.json"
    learned.write_text("{}")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["learned"] = [{"name": "learned.json", "bytes": 2, "sha256": "0" * 64}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"learned.json: its content has changed"):
        verify(folder)


def rewritten(folder, name, alter):
    """Alter an array of the first training shard, with a new checksum."""
    path = folder / f"train-0-{name}.npy"
    array = np.load(path)
    alter(array)
    entry = write_array(folder, path.name, array)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parts"]["train"][0]["files"][name] = entry.model_dump()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return path


def put(index, value):
    def alter(array):
        array[index] = value

    return alter


@pytest.mark.parametrize("piece_bytes", [1, 1 << 24])
@pytest.mark.parametrize(
    "name, alter, found",
    [
        ("ids", put((13, 1), 50), "row 13: id 50 of field 'C2', whose table has the rows 0 to 49"),
        ("ids", put((0, 0), -1), "row 0: id -1 of field 'C1'"),
        ("values_1", put(5, 77), "row 5: id 77 of field 'M2'"),
        ("label", put(19, 2), "row 19: the label 2 instead of 0 or 1"),
        ("numbers", put((4, 1), np.nan), "row 4: nan for the number 'I2'"),
        ("numbers", put((4, 0), np.inf), "row 4: inf for the number 'I1'"),
        ("weight", put(3, -0.5), "row 3: the weight -0.5"),
        ("weight", put(3, np.nan), "row 3: the weight nan"),
        ("offsets_0", put(7, 10**15), "row 7: 1000000000000000 is followed by a smaller number"),
    ],
)
def test_verify_finds_impossible_values(folder, monkeypatch, name, alter, found, piece_bytes):
    monkeypatch.setattr(contents, "_PIECE_BYTES", piece_bytes)
    path = rewritten(folder, name, alter)
    with pytest.raises(DataError) as refusal:
        verify(folder)
    assert f"{path}: {found}" in str(refusal.value)
    assert "1 of " in str(refusal.value)


@pytest.mark.parametrize("value", [10**15, -3])
def test_offsets_that_descend_are_named_when_they_are_read(folder, value):
    path = rewritten(folder, "offsets_1", put(7, value))
    dataset = open_prepared(folder)
    for read in (
        lambda: dataset.train.read(torch.arange(50)),
        lambda: dataset.train.resident(torch.device("cpu")),
    ):
        with pytest.raises(DataError, match="do not ascend") as refusal:
            read()
        assert str(refusal.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "name, alter, found",
    [
        ("ids", put((13, 1), 50), "row 13: id 50 of field 'C2', whose table has the rows 0 to 49"),
        ("ids", put((0, 0), -1), "row 0: id -1 of field 'C1'"),
        ("ids", put((19, 2), -(2**31)), "row 19: id -2147483648 of field 'C3'"),
        ("values_1", put(5, 77), "row 5: id 77 of field 'M2'"),
        ("values_0", put(5, -1), "row 5: id -1 of field 'M1'"),
        ("label", put(19, 2), "row 19: the label 2 instead of 0 or 1"),
        ("label", put(0, 255), "row 0: the label 255 instead of 0 or 1"),
    ],
)
def test_impossible_ids_and_labels_are_named_when_they_are_read(folder, name, alter, found):
    path = rewritten(folder, name, alter)
    train = open_prepared(folder).train
    for read in (
        lambda: train.read(torch.arange(50)),
        lambda: train.read(torch.arange(20)),
        lambda: train.resident(torch.device("cpu")),
    ):
        with pytest.raises(DataError) as refusal:
            read()
        assert str(refusal.value).startswith(f"{path}: {found}")
    # Rows of other shards are read.
    assert len(train.read(torch.arange(20, 50)).label) == 30


def test_the_last_id_of_a_table_is_read(tmp_path):
    arrays = drawn_rows(9, single=2, multi=1)
    arrays["ids"][:] = 49
    arrays["values_0"][:] = 49
    arrays["label"][:] = 1
    for kind in (np.int32, np.int64):
        for name in ("ids", "values_0"):
            arrays[name] = arrays[name].astype(kind)
        data = write_prepared(tmp_path / kind.__name__, {"train": arrays, "test": arrays},
                              drawn_fields(2, 1))  # fmt: skip
        train = open_prepared(data).train
        for part in (train, train.resident(torch.device("cpu"))):
            assert part.read(torch.arange(9)).ids.unique().tolist() == [49]
