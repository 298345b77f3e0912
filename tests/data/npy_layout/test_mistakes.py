"""Files that cannot be imported, and what users are told."""

import pickle

import numpy as np
import pytest

from stampede.data import DataError
from stampede.data.npy_layout import import_npy
from stampede.data.npy_layout.__main__ import main
from stampede.data.npy_layout.arrays import BLOCK_ROWS
from support.npy_files import write_npy


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
