"""Preparation of Criteo's log against pandas, and what damaged files get."""

import gzip
import os
import shutil

import numpy as np
import pandas as pd
import pytest

from stampede.data import DataError
from stampede.data.criteo_kaggle import COLUMNS, FIELDS, NUMBERS, CriteoSplit, prepare
from stampede.data.prepared.old import cached, open_prepared
from support.paths import shared


def write(path, frame):
    frame.to_csv(path, sep="\t", header=False, index=False)
    return path


@pytest.fixture(scope="module")
def made_up():
    """A log in Criteo's layout with missing values, rare ids and negative numbers."""
    draw = np.random.default_rng(0)
    rows = 3000
    frame = pd.DataFrame({"label": draw.integers(0, 2, rows)})
    for i, name in enumerate(NUMBERS):
        values = pd.Series(draw.integers(-3, 10 ** (i % 5 + 1), rows)).astype("Int64")
        frame[name] = values.mask(draw.random(rows) < 0.3)
    for i, name in enumerate(FIELDS):
        ids = pd.Series(draw.zipf(1.3, rows) % (3 + 50 * i)).map("{:08x}".format)
        frame[name] = ids.mask(draw.random(rows) < (0.2 if i % 2 else 0.0))
    return frame


def by_pandas(frame, split, validation_fraction):
    """The same preparation, written independently; ids are compared up to renaming."""
    rows = len(frame)
    assert split == "sequential"
    n_train = int((1 - 1 / 7) * rows)
    fit = frame.iloc[: n_train - int(validation_fraction * n_train)]
    dense = frame[list(NUMBERS)].astype("float64").fillna(0)
    low, high = dense.loc[fit.index].min(), dense.loc[fit.index].max()
    dense = ((dense - low) / (high - low).replace(0, 1)).clip(0, 1)
    ids = frame[list(FIELDS)].fillna("-1")
    known = {name: set(ids.loc[fit.index, name]) for name in FIELDS}
    ids = ids.apply(lambda column: column.where(column.isin(known[column.name]), "unseen"))
    return dense.to_numpy(), ids, known, len(fit), n_train


@pytest.mark.parametrize("validation_fraction", [0.0, 0.1])
def test_against_pandas(made_up, tmp_path, validation_fraction):
    check_against_pandas(write(tmp_path / "log.tsv", made_up), made_up, validation_fraction)


def test_real_rows_against_pandas(tmp_path):
    log = shared("data/criteo_kaggle_137k.tsv.gz")
    frame = pd.read_csv(log, sep="\t", names=list(COLUMNS), nrows=4000)
    path = tmp_path / "log.tsv.gz"
    with gzip.open(log, "rb") as whole, gzip.open(path, "wb") as head:
        for _ in range(4000):
            head.write(whole.readline())
    check_against_pandas(path, frame, 0.1)


def check_against_pandas(path, frame, validation_fraction):
    found = prepare(path, CriteoSplit("sequential", 0, validation_fraction))
    dense, ids, known, fitted, trained = by_pandas(frame, "sequential", validation_fraction)
    assert found.parts.train == fitted
    assert found.parts.validation == trained - fitted
    assert found.parts.test == len(frame) - trained
    np.testing.assert_array_equal(found.label, frame["label"])
    np.testing.assert_allclose(found.dense, dense, rtol=1e-6, atol=1e-7)
    for i, name in enumerate(FIELDS):
        assert found.vocabulary_sizes[name] == len(known[name]) + 1
        pairs = set(zip(found.ids[:, i].tolist(), ids[name], strict=True))
        # One row per value and one value per row; only unseen values share row 0.
        assert len({row for row, _ in pairs}) == len(pairs) == len({value for _, value in pairs})
        assert all((row == 0) == (value == "unseen") for row, value in pairs)
        assert found.ids[:, i].max() < found.vocabulary_sizes[name]


def test_random_split_is_a_tenth_by_seed(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    one, same, other = (prepare(path, CriteoSplit("random", seed, 0.1)) for seed in (1, 1, 2))
    assert (one.parts.train, one.parts.validation, one.parts.test) == (2430, 270, 300)
    np.testing.assert_array_equal(one.label, same.label)
    assert not np.array_equal(one.label, other.label)
    assert sorted(one.label) == sorted(other.label)


def lines_of(frame):
    return frame.to_csv(sep="\t", header=False, index=False).splitlines()


@pytest.mark.parametrize(
    "column, text, words",
    [
        (3, "abc", ["line 41", "column I3", "'abc'"]),
        (3, "nan", ["line 41", "column I3", "finite"]),
        (0, "2", ["line 41", "column label", "found 2", "0 or 1"]),
        (0, "", ["line 41", "column label", "0 or 1"]),
        (5, "1\t1", ["line 41", "41", "40 tab-separated columns"]),
    ],
)
def test_bad_lines_are_named(made_up, tmp_path, column, text, words):
    lines = lines_of(made_up.head(200))
    cells = lines[40].split("\t")
    cells[column] = text
    lines[40] = "\t".join(cells)
    path = tmp_path / "log.tsv"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as failure:
        prepare(path, CriteoSplit())
    for word in [str(path), *words]:
        assert word in str(failure.value)


def test_a_missing_column_is_named(made_up, tmp_path):
    lines = lines_of(made_up.head(200))
    lines[40] = lines[40].rsplit("\t", 1)[0]
    path = tmp_path / "log.tsv"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"line 41.*got 39"):
        prepare(path, CriteoSplit())


def test_invalid_text_is_named(made_up, tmp_path):
    lines = [line.encode() for line in lines_of(made_up.head(200))]
    lines[40] = lines[40].rsplit(b"\t", 1)[0] + b"\t\xff\xfe"
    path = tmp_path / "log.tsv"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError, match=r"column C26: line 41.*UTF8"):
        prepare(path, CriteoSplit())


def test_truncated_gzip_and_absent_and_empty_files(made_up, tmp_path):
    path = tmp_path / "log.tsv.gz"
    packed = gzip.compress("\n".join(lines_of(made_up)).encode())
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match="truncated gzip"):
        prepare(path, CriteoSplit())
    with pytest.raises(DataError, match="absent: No such file"):
        prepare(tmp_path / "absent", CriteoSplit())
    (tmp_path / "empty").write_text("")
    with pytest.raises(DataError, match="empty: Empty"):
        prepare(tmp_path / "empty", CriteoSplit())
    with pytest.raises(DataError, match="too few"):
        prepare(write(tmp_path / "few", made_up.head(3)), CriteoSplit())


def use_cache(path, cache, split=CriteoSplit()):
    made = []

    def make():
        made.append(True)
        return prepare(path, split)

    return cached(path, split, make, cache), bool(made)


def test_cache_is_used_again_and_named_by_content_and_options(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    cache = tmp_path / "cache"
    folder, made = use_cache(path, cache)
    assert made
    assert use_cache(path, cache) == (folder, False)
    assert use_cache(path, cache, CriteoSplit("random"))[0] != folder
    os.utime(path)
    assert use_cache(path, cache) == (folder, False)
    write(path, made_up.iloc[::-1])
    assert use_cache(path, cache)[0] != folder
    dataset = open_prepared(folder)
    arrays = prepare(write(path, made_up), CriteoSplit())
    read = dataset.validation.read(np.array([0, 5]))
    np.testing.assert_array_equal(read.ids, arrays.ids[dataset.train.rows + np.array([0, 5])])
    assert dataset.train.rows + dataset.validation.rows + dataset.test.rows == 3000


def test_a_half_written_cache_is_never_used(made_up, tmp_path, monkeypatch):
    path = write(tmp_path / "log.tsv", made_up)
    cache = tmp_path / "cache"
    save, calls = np.save, []

    def fail_late(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        save(*arguments)

    monkeypatch.setattr(np, "save", fail_late)
    with pytest.raises(DataError, match="No space left"):
        use_cache(path, cache)
    monkeypatch.undo()
    assert list(cache.iterdir()) == []
    # What a kill leaves behind does not count either.
    folder, _ = use_cache(path, cache)
    shutil.copytree(folder, cache / f".{folder.name}-killed")
    shutil.rmtree(folder)
    assert use_cache(path, cache) == (folder, True)


def test_a_damaged_cache_says_what_to_delete(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    folder, _ = use_cache(path, tmp_path / "cache")
    (folder / "dense.npy").write_bytes((folder / "dense.npy").read_bytes()[:1000])
    with pytest.raises(DataError, match="delete this folder"):
        open_prepared(folder)
