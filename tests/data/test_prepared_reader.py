"""Opening and verifying prepared folders, whole and damaged."""

import json

import numpy as np
import pytest
import torch

from stampede.data import DataError, click_share
from stampede.data.prepared.reader import open_prepared
from stampede.data.prepared.verify import verify
from stampede.data.samples import Slice
from support.prepared import drawn_fields, drawn_rows, write_prepared, write_small


@pytest.fixture
def folder(tmp_path):
    return write_small(tmp_path / "data")


def test_a_folder_is_opened_as_it_was_written(folder):
    dataset = open_prepared(folder)
    assert dataset.vocabulary_sizes == {"C1": 50, "C2": 50, "C3": 50, "M1": 50, "M2": 50}
    assert (dataset.numbers, dataset.multi, dataset.has_weight) == (2, ("M1", "M2"), True)
    assert [p.rows for p in (dataset.train, dataset.validation, dataset.test)] == [50, 7, 20]
    # Nothing is read yet.
    assert all(isinstance(m, np.memmap) for s in dataset.train.shards for m in s.maps.values())
    arrays = drawn_rows(50, multi=2, weight=True)
    rows = np.array([0, 3, 19, 20, 20, 41, 49])
    read = dataset.train.read(torch.from_numpy(rows))
    label = dataset.train.label(torch.from_numpy(rows))
    weight = dataset.train.weight(torch.from_numpy(rows))
    for found, name in (
        (read.ids, "ids"), (read.dense, "numbers"), (read.label, "label"), (label, "label"),
        (read.weight, "weight"), (weight, "weight"),
    ):  # fmt: skip
        np.testing.assert_array_equal(found, arrays[name][rows])
    for i, bag in enumerate(read.bags):
        offsets, values = arrays[f"offsets_{i}"], arrays[f"values_{i}"]
        wanted = [values[offsets[row] : offsets[row + 1]].tolist() for row in rows]
        assert bag.values.tolist() == [value for bag in wanted for value in bag]
        assert bag.lengths.tolist() == [len(bag) for bag in wanted]


def test_share_of_clicks(folder, monkeypatch):
    monkeypatch.setattr("stampede.data.samples._CHUNK", 7)
    arrays = drawn_rows(50, multi=2, weight=True)
    weight = arrays["weight"].astype(np.float64)
    part = open_prepared(folder).train
    for start, stop in ((0, 50), (3, 40)):
        expected = np.average(arrays["label"][start:stop], weights=weight[start:stop])
        assert click_share(Slice(part, start, stop)) == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr(type(part), "weight", lambda _, rows: torch.zeros(len(rows)))
    assert click_share(part) is None


def test_a_damaged_file_is_named(folder):
    path = folder / "train-0-ids.npy"
    whole = path.read_bytes()
    for damaged in (whole[:-40], whole + b"1", bytes(len(whole)), None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"^{path}: .*--verify {folder}"):
            open_prepared(folder)


def test_verify_names_every_file_that_differs(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["learned"] = [{"name": "learned.json", "bytes": 2, "sha256": "0" * 64}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "learned.json").write_text("{}")
    path = folder / "test-0-values_1.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    gone = folder / "validation-0-label.npy"
    gone.unlink()
    with pytest.raises(DataError) as refusal:
        verify(folder)
    text = str(refusal.value)
    assert "3 of " in text and f"{gone}: No such file" in text
    for changed in (path, folder / "learned.json"):
        assert f"{changed}: its content has changed" in text


def test_folders_that_cannot_be_used(tmp_path):
    parts = {"train": drawn_rows(4), "test": drawn_rows(0)}
    folder = write_prepared(tmp_path / "data", parts, drawn_fields())
    with pytest.raises(DataError, match="test part has no rows"):
        open_prepared(folder)
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    with pytest.raises(DataError, match=r"manifest.json: damaged.*delete the folder to prepare"):
        open_prepared(folder)
