"""What is exported, against TorchRec's own readers."""

import json

import numpy as np
import pytest

from stampede.data import DataError
from stampede.data.npy_layout import export, import_npy
from stampede.data.npy_layout.__main__ import main
from support.npy_files import PREFIXES
from support.prepared import drawn_fields, drawn_rows, write_prepared
from support.prepared_arrays import arrays_of, manifest_of


@pytest.mark.parametrize("mmap_mode", [False, True])
def test_torchrec_reads_what_is_exported(prepared, tmp_path, criteo, mmap_mode):
    export(prepared, tmp_path / "out")
    for part, prefix in PREFIXES.items():
        pipe = criteo.InMemoryBinaryCriteoIterDataPipe(
            stage="train",
            **{
                f"{name}_paths": [str(tmp_path / "out" / f"{prefix}_{name}.npy")]
                for name in ("dense", "sparse", "labels")
            },
            batch_size=32,
            rank=0,
            world_size=1,
            mmap_mode=mmap_mode,
            # The vocabulary sizes; TorchRec 1.6 must have some.
            hashes=[50] * 26,
        )
        batches = list(pipe)
        expected, _ = arrays_of(prepared, part)
        assert sum(len(batch.labels) for batch in batches) == len(expected["label"])
        ids = [batch.sparse_features.values().reshape(26, -1).T for batch in batches]
        np.testing.assert_array_equal(np.concatenate(ids), expected["ids"])
        dense = np.concatenate([batch.dense_features for batch in batches])
        np.testing.assert_array_equal(dense, expected["numbers"])
        labels = np.concatenate([batch.labels for batch in batches])
        np.testing.assert_array_equal(labels, expected["label"])


def test_exported_types_and_what_stands_beside_them(prepared, tmp_path):
    export(prepared, tmp_path / "out")
    for name, shape, dtype in (
        ("dense", (250, 13), np.float32),
        ("sparse", (250, 26), np.int32),
        ("labels", (250, 1), np.int32),
    ):
        array = np.load(tmp_path / "out" / f"train_{name}.npy")
        assert (array.shape, array.dtype) == (shape, dtype)
    layout = json.loads((tmp_path / "out" / "layout.json").read_text())
    assert layout["fields"] == manifest_of(prepared)["fields"]
    assert layout["rows"] == {"train": 250, "val": 40, "test": 71}
    assert "[rows, 26]" in (tmp_path / "out" / "README.txt").read_text()


def test_export_and_import_come_back_to_the_same(prepared, tmp_path):
    export(prepared, tmp_path / "npy")
    import_npy(tmp_path / "npy", tmp_path / "back")
    before, after = manifest_of(prepared), manifest_of(tmp_path / "back")
    for key in ("fields", "numbers", "ids_dtype", "numbers_dtype"):
        assert before[key] == after[key]
    for part in PREFIXES:
        expected, _ = arrays_of(prepared, part)
        found, _ = arrays_of(tmp_path / "back", part)
        assert expected.keys() == found.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype


def test_half_numbers_and_long_ids(tmp_path):
    arrays = drawn_rows(20, single=2, numbers=3)
    arrays["ids"] = arrays["ids"].astype(np.int64)
    arrays["numbers"] = arrays["numbers"].astype(np.float16)
    fields = drawn_fields(single=2)
    write_prepared(tmp_path / "prepared", {"train": arrays, "test": arrays}, fields)
    export(tmp_path / "prepared", tmp_path / "out")
    assert np.load(tmp_path / "out" / "test_sparse.npy").dtype == np.int64
    dense = np.load(tmp_path / "out" / "test_dense.npy")
    assert dense.dtype == np.float32
    np.testing.assert_array_equal(dense, arrays["numbers"])
    assert not list((tmp_path / "out").glob("val_*"))


def test_fields_of_several_ids_have_no_place(tmp_path, capsys):
    arrays = drawn_rows(20, single=1, multi=1)
    write_prepared(
        tmp_path / "prepared", {"train": arrays, "test": arrays}, drawn_fields(1, multi=1)
    )
    assert main(["export", str(tmp_path / "prepared"), str(tmp_path / "out")]) == 2
    assert "field 'M1' has several ids per sample" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_damaged_prepared_folder_leaves_nothing(prepared, tmp_path):
    (prepared / "test-0-ids.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"test-0-ids\.npy: no array that can be read"):
        export(prepared, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]
