"""Files of TorchRec's and MLPerf's Criteo readers, against TorchRec's own readers and numpy."""

import builtins
import sys
import types

import numpy as np
import pytest
from peers.criteo_npy import import_criteo_npy

from support.prepared_arrays import arrays_of, manifest_of


def check_part(folder, part, parts):
    """A prepared part is those rows."""
    found, bags = arrays_of(folder, part)
    assert not bags
    for name, array in (("ids", "sparse"), ("numbers", "dense"), ("label", "labels")):
        expected = np.concatenate([arrays[array] for arrays in parts])
        np.testing.assert_array_equal(found[name], expected.reshape(found[name].shape))
    assert [found[name].dtype for name in ("numbers", "label")] == [np.float32, np.uint8]


@pytest.fixture
def criteo(monkeypatch):
    """TorchRec's module, with `open` in place of iopath, which TorchRec does not require."""
    manager = types.SimpleNamespace(open=builtins.open, set_strict_kwargs_checking=lambda _: None)
    file_io = types.ModuleType("iopath.common.file_io")
    file_io.PathManagerFactory = lambda: types.SimpleNamespace(get=lambda _: manager)
    file_io.PathManager = object
    for name in ("iopath", "iopath.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "iopath.common.file_io", file_io)
    return pytest.importorskip("torchrec.datasets.criteo")


def read_by_torchrec(criteo, folder, days, stage, size):
    """What TorchRec's reader gives of some days, with ids modulo `size`."""
    files = {
        f"{name}_paths": [str(folder / f"day_{day}_{name}.npy") for day in days]
        for name in ("dense", "sparse", "labels")
    }
    (batch,) = criteo.InMemoryBinaryCriteoIterDataPipe(
        stage=stage, **files, batch_size=50, rank=0, world_size=1, hashes=[size] * 26
    )
    return {
        "dense": batch.dense_features.numpy(),
        "sparse": batch.sparse_features.values().reshape(26, len(batch.labels)).T.numpy(),
        "labels": batch.labels.numpy(),
    }


def test_what_torchrec_writes_is_imported(tmp_path, criteo):
    folder = tmp_path / "npy"
    folder.mkdir()
    draw = np.random.default_rng(0)
    # Day 10 is after day 9.
    for day in (8, 9, 10):
        cells = np.hstack([draw.integers(0, 2, (25, 14)), draw.integers(0, 2**32, (25, 26))])
        lines = ["\t".join([*map(str, row[:14]), *map("{:x}".format, row[14:])]) for row in cells]
        (tmp_path / "day.tsv").write_text("\n".join(lines) + "\n")
        files = [folder / f"day_{day}_{name}.npy" for name in ("dense", "sparse", "labels")]
        criteo.BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "day.tsv"), *map(str, files))
    written = [
        {name: np.load(folder / f"day_{day}_{name}.npy") for name in ("dense", "sparse", "labels")}
        for day in (8, 9, 10)
    ]
    assert written[0]["sparse"].max() > 2**31
    import_criteo_npy(folder, tmp_path / "raw")
    manifest = manifest_of(tmp_path / "raw")
    assert manifest["ids_dtype"] == "int64"
    largest = np.max([arrays["sparse"].max(axis=0) for arrays in written], axis=0)
    assert [field["rows"] for field in manifest["fields"]] == (largest + 1).tolist()
    check_part(tmp_path / "raw", "train", written[:2])

    # As its readers do with `hashes`.
    import_criteo_npy(folder, tmp_path / "hashed", sizes=[1000], modulo=True)
    assert manifest_of(tmp_path / "hashed")["ids_dtype"] == "int32"
    read = read_by_torchrec(criteo, folder, [8, 9], "train", 1000)
    np.testing.assert_array_equal(arrays_of(tmp_path / "hashed", "train")[0]["ids"], read["sparse"])
    # The last day is halved: 13 and 12 rows.
    for stage, part in (("val", "validation"), ("test", "test")):
        check_part(tmp_path / "hashed", part, [read_by_torchrec(criteo, folder, [10], stage, 1000)])
