"""The layout of TorchRec's Criteo readers, against those readers themselves and numpy."""

import builtins
import json
import pickle
import sys
import types

import numpy as np
import pytest

from stampede.data import DataError
from stampede.data.npy_layout import export, import_npy
from stampede.data.npy_layout.__main__ import main
from stampede.data.npy_layout.arrays import BLOCK_ROWS
from support.prepared import drawn_fields, drawn_rows, write_prepared
from support.prepared_arrays import arrays_of, manifest_of

PREFIXES = {"train": "train", "validation": "val", "test": "test"}


@pytest.fixture
def criteo(monkeypatch):
    """TorchRec's module; where iopath is absent, which it opens local files with, `open` does."""
    try:
        import iopath  # noqa: F401
    except ImportError:
        manager = types.SimpleNamespace(
            open=builtins.open, set_strict_kwargs_checking=lambda _: None
        )
        factory = types.SimpleNamespace(get=lambda _: manager)
        file_io = types.ModuleType("iopath.common.file_io")
        file_io.PathManagerFactory = lambda: factory
        file_io.PathManager = object
        for name in ("iopath", "iopath.common"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "iopath.common.file_io", file_io)
    return pytest.importorskip("torchrec.datasets.criteo")


@pytest.fixture
def prepared(tmp_path):
    rows = {"train": 250, "validation": 40, "test": 71}
    parts = {
        part: drawn_rows(count, single=26, numbers=13, seed=seed)
        for seed, (part, count) in enumerate(rows.items())
    }
    folder = tmp_path / "prepared"
    write_prepared(folder, parts, drawn_fields(single=26), shard_rows=100)
    return folder


def write_npy(folder, name, rows, fields=3, numbers=2, seed=0, ids=np.int32, **changed):
    """Three files of random rows; returns their arrays."""
    draw = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    arrays = {
        "dense": draw.random((rows, numbers), dtype=np.float32),
        "sparse": draw.integers(0, 40, (rows, fields)).astype(ids),
        "labels": draw.integers(0, 2, (rows, 1), dtype=np.int32),
        **changed,
    }
    for array, values in arrays.items():
        np.save(folder / f"{name}_{array}.npy", values)
    return arrays


def check_part(folder, part, parts):
    """A prepared part is those rows."""
    found, bags = arrays_of(folder, part)
    assert not bags
    ids = np.concatenate([arrays["sparse"] for arrays in parts])
    numbers = np.concatenate([arrays["dense"] for arrays in parts])
    label = np.concatenate([arrays["labels"].reshape(-1) for arrays in parts])
    np.testing.assert_array_equal(found["ids"], ids)
    np.testing.assert_array_equal(found["numbers"], numbers)
    np.testing.assert_array_equal(found["label"], label)
    assert [found[name].dtype for name in ("numbers", "label")] == [np.float32, np.uint8]


# Writing


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


# Reading


def test_what_torchrec_writes_is_imported(tmp_path, criteo):
    folder = tmp_path / "npy"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for day in range(3):
        lines = []
        for _ in range(25):
            numbers = ["" if draw.random() < 0.2 else str(draw.integers(0, 99)) for _ in range(13)]
            ids = ["" if draw.random() < 0.2 else f"{draw.integers(0, 2**32):x}" for _ in range(26)]
            lines.append("\t".join([str(draw.integers(0, 2)), *numbers, *ids]) + "\n")
        (tmp_path / "day.tsv").write_text("".join(lines))
        files = [folder / f"day_{day}_{name}.npy" for name in ("dense", "sparse", "labels")]
        criteo.BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "day.tsv"), *map(str, files))
    written = [
        {name: np.load(folder / f"day_{day}_{name}.npy") for name in ("dense", "sparse", "labels")}
        for day in range(3)
    ]
    assert written[0]["sparse"].max() > 2**31
    import_npy(folder, tmp_path / "raw")
    manifest = manifest_of(tmp_path / "raw")
    assert manifest["ids_dtype"] == "int64"
    largest = np.max([arrays["sparse"].max(axis=0) for arrays in written], axis=0)
    assert [field["rows"] for field in manifest["fields"]] == (largest + 1).tolist()
    assert [field["name"] for field in manifest["fields"]] == [f"C{i}" for i in range(1, 27)]
    assert manifest["numbers"] == [f"I{i}" for i in range(1, 14)]
    check_part(tmp_path / "raw", "train", written[:2])

    # As its readers do with `hashes`.
    import_npy(folder, tmp_path / "hashed", sizes=[1000], modulo=True)
    assert manifest_of(tmp_path / "hashed")["ids_dtype"] == "int32"
    found, _ = arrays_of(tmp_path / "hashed", "train")
    pipe = criteo.InMemoryBinaryCriteoIterDataPipe(
        stage="train",
        **{
            f"{name}_paths": [str(folder / f"day_{day}_{name}.npy") for day in range(2)]
            for name in ("dense", "sparse", "labels")
        },
        batch_size=50,
        rank=0,
        world_size=1,
        hashes=[1000] * 26,
    )
    (batch,) = list(pipe)
    ids = batch.sparse_features.values().reshape(26, 50).T
    np.testing.assert_array_equal(found["ids"], ids)


@pytest.mark.parametrize("rows", [20, 21])
def test_the_last_day_is_halved_as_torchrec_does(tmp_path, criteo, rows):
    folder = tmp_path / "npy"
    # Day 10 is after day 9.
    days = [write_npy(folder, f"day_{day}", 10 + day, 26, 13, seed=day) for day in (8, 9)]
    last = write_npy(folder, "day_10", rows, 26, 13, seed=10)
    import_npy(folder, tmp_path / "out")
    check_part(tmp_path / "out", "train", days)
    for stage, part in (("val", "validation"), ("test", "test")):
        pipe = criteo.InMemoryBinaryCriteoIterDataPipe(
            stage=stage,
            dense_paths=[str(folder / "day_10_dense.npy")],
            sparse_paths=[str(folder / "day_10_sparse.npy")],
            labels_paths=[str(folder / "day_10_labels.npy")],
            batch_size=100,
            rank=0,
            world_size=1,
            hashes=[40] * 26,
        )
        (batch,) = list(pipe)
        count = len(batch.labels)
        read = {
            "dense": batch.dense_features.numpy(),
            "sparse": batch.sparse_features.values().reshape(26, count).T.numpy(),
            "labels": batch.labels.numpy(),
        }
        check_part(tmp_path / "out", part, [read])
    check_part(tmp_path / "out", "validation", [{k: v[: -(-rows // 2)] for k, v in last.items()}])


def test_contiguous_ids_of_torchrec(tmp_path, criteo):
    folder, raw = tmp_path / "npy", tmp_path / "raw"
    days = {f"day_{day}": write_npy(folder, f"day_{day}", 30, 26, 13, seed=day) for day in (0, 1)}
    raw.mkdir()
    for name in days:
        (folder / f"{name}_sparse.npy").rename(raw / f"{name}_sparse.npy")
    files = [str(raw / f"{name}_sparse.npy") for name in days]
    criteo.BinaryCriteoUtils.sparse_to_contiguous(files, str(folder), frequency_threshold=3)
    import_npy(folder, tmp_path / "out")
    found, _ = arrays_of(tmp_path / "out", "train")
    np.testing.assert_array_equal(found["ids"], np.load(folder / "day_0_sparse_contig_freq.npy"))
    # TorchRec gives rare ids row 1.
    assert {field["unseen_row"] for field in manifest_of(tmp_path / "out")["fields"]} == {1}


def test_several_files_of_a_part_and_more_rows_than_a_block(tmp_path):
    folder = tmp_path / "npy"
    train = [write_npy(folder, f"train_{i}", rows, seed=i) for i, rows in ((2, 5), (10, 7))]
    rows = BLOCK_ROWS + 3
    train.append(write_npy(folder, "train_11", rows, seed=5, labels=np.arange(rows) % 2))
    test = [write_npy(folder, "test", 9, ids=np.int64)]
    import_npy(folder, tmp_path / "out")
    check_part(tmp_path / "out", "train", train)
    check_part(tmp_path / "out", "test", test)
    manifest = manifest_of(tmp_path / "out")
    assert [shard["rows"] for shard in manifest["parts"]["train"]] == [5, 7, rows]
    assert [field["rows"] for field in manifest["fields"]] == [40] * 3
    assert manifest["ids_dtype"] == "int32"


def test_links_save_the_copy(tmp_path):
    folder = tmp_path / "npy"
    train, test = (write_npy(folder, name, 20, seed=i) for i, name in enumerate(("train", "test")))
    np.save(folder / "test_dense.npy", test["dense"].astype(np.float64))
    import_npy(folder, tmp_path / "out", link=True)
    linked = {path.name for path in (tmp_path / "out").iterdir() if path.stat().st_nlink > 1}
    # The others need another type.
    assert linked == {"train-00000-ids.npy", "train-00000-numbers.npy", "test-00000-ids.npy"}
    check_part(tmp_path / "out", "train", [train])
    check_part(tmp_path / "out", "test", [test])
    import_npy(folder, tmp_path / "copied")
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "copied").iterdir())


def test_given_sizes(tmp_path):
    folder = tmp_path / "npy"
    for name in ("train", "val", "test"):
        write_npy(folder, name, 20)
    import_npy(folder, tmp_path / "out", sizes=[40, 50, 60])
    fields = manifest_of(tmp_path / "out")["fields"]
    assert [field["rows"] for field in fields] == [40, 50, 60]


def at(array, place, value):
    changed = array.copy()
    changed[place] = value
    return changed


def damage(kind, folder, arrays):
    """Spoil the test part."""
    sparse, dense, labels = (arrays[name] for name in ("sparse", "dense", "labels"))
    changes = {
        "negative": ("test_sparse", lambda: at(sparse, (7, 2), -5)),
        "too large": ("test_sparse", lambda: at(sparse, (3, 1), 1000)),
        "label": ("test_labels", lambda: at(labels, 4, -1)),
        "nan": ("test_dense", lambda: at(dense, (5, 0), np.nan)),
        "rows": ("test_dense", lambda: dense[:-1]),
        "columns": ("test_sparse", lambda: sparse[:, :2]),
        "flat": ("test_dense", lambda: dense.reshape(-1)),
        "wide labels": ("test_labels", lambda: labels.reshape(10, 2)),
        "fractions": ("test_sparse", lambda: sparse.astype(np.float32)),
        "text": ("test_dense", lambda: dense.astype(str)),
    }
    if kind in changes:
        name, change = changes[kind]
        np.save(folder / f"{name}.npy", change())
    elif kind == "pickled":
        np.save(folder / "test_sparse.npy", sparse.astype(object), allow_pickle=True)
    elif kind == "pickle":
        (folder / "test_sparse.npy").write_bytes(pickle.dumps(sparse))
    elif kind == "cut":
        path = folder / "test_sparse.npy"
        path.write_bytes(path.read_bytes()[:-8])
    elif kind == "absent":
        (folder / "test_labels.npy").unlink()
    elif kind == "no part":
        for path in folder.glob("test_*"):
            path.rename(folder / path.name.replace("test", "holdout"))
    elif kind == "no test":
        for path in folder.glob("test_*"):
            path.unlink()
    elif kind == "stranger":
        np.save(folder / "weights.npy", dense)
    elif kind == "twice":
        np.save(folder / "test_sparse_contig_freq.npy", sparse)


@pytest.mark.parametrize(
    "kind, sentence",
    [
        ("negative", "test_sparse.npy: row 7, column 2 (from 0): found -5; write 0 or more"),
        ("too large", "test_sparse.npy: row 3, column 1 (from 0): found 1000;"),
        ("label", "test_labels.npy: row 4 (from 0): found -1; write 0 or 1"),
        ("nan", "test_dense.npy: row 5, column 0 (from 0): found nan; write finite numbers"),
        ("rows", "test_dense.npy: found 19 rows, but 20 in test_labels.npy"),
        ("columns", "train_sparse.npy: found 3 columns, but 2 in test_sparse.npy"),
        ("flat", "test_dense.npy: found the shape (40,); write [rows, columns]"),
        ("wide labels", "test_labels.npy: found the shape (10, 2); write [rows, 1]"),
        ("fractions", "test_sparse.npy: found type float32; write int32 or int64"),
        ("text", "test_dense.npy: found type <U"),
        ("pickled", "test_sparse.npy: no array that can be read"),
        ("pickle", "test_sparse.npy: no array that can be read"),
        ("cut", "test_sparse.npy: no array that can be read"),
        ("absent", "test_labels.npy is absent"),
        ("no part", "holdout_dense.npy does not tell which part"),
        ("no test", "no files of the test part"),
        ("stranger", "weights.npy: its name ends with none of"),
        ("twice", "holds the same rows; keep one of the two"),
    ],
)
def test_bad_files(tmp_path, kind, sentence, capsys):
    folder = tmp_path / "npy"
    write_npy(folder, "train", 30, seed=1)
    damage(kind, folder, write_npy(folder, "test", 20, seed=2))
    command = ["import", str(folder), str(tmp_path / "out"), "--sizes", "100"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "error: " in error and sentence in error
    assert not (tmp_path / "out").exists()


def test_other_mistakes(tmp_path, capsys):
    folder, out = tmp_path / "npy", tmp_path / "out"
    for arguments, sentence in (
        ([str(folder), str(out)], "no such folder"),
        ([str(tmp_path), str(out)], "no .npy file"),
        ([str(folder), str(out), "--modulo"], "modulo needs the sizes"),
        ([str(folder), str(tmp_path)], "exists already"),
    ):
        assert main(["import", *arguments]) == 2
        assert sentence in capsys.readouterr().err
    write_npy(folder, "day_0", 30)
    assert main(["import", str(folder), str(out)]) == 2
    assert "found day_0 alone, need two days or more" in capsys.readouterr().err
    write_npy(folder, "day_1", 30)
    assert main(["import", str(folder), str(out), "--sizes", "50,60"]) == 2
    assert "for all fields, or 3 of them" in capsys.readouterr().err
    (folder / "layout.json").write_text('{"fields": []}')
    assert main(["import", str(folder), str(out)]) == 2
    assert f"{folder / 'layout.json'}: damaged" in capsys.readouterr().err
    (folder / "layout.json").unlink()
    assert main(["import", str(folder), str(out)]) == 0
    assert "train 30, validation 15, test 15 rows; 3 tables of 117 rows" in capsys.readouterr().out


def test_a_bad_value_far_down_is_named(tmp_path):
    folder = tmp_path / "npy"
    rows = BLOCK_ROWS + 10
    write_npy(folder, "train", rows, labels=np.where(np.arange(rows) == rows - 4, 7, 1))
    write_npy(folder, "test", 20)
    with pytest.raises(DataError, match=f"row {rows - 4} .from 0.: found 7; write 0 or 1"):
        import_npy(folder, tmp_path / "out")
