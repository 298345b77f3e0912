"""Which rows go to training, validation and test."""

import json

import numpy as np
import pytest

from stampede.data import DataError
from stampede.data.options import Split
from stampede.settings import from_key_values
from support.prepared_arrays import arrays_of, manifest_of
from support.preparing import BY_DAY, PARTS, check_criteo, dated, prepared, table, write


def test_random_parts_are_exact_and_by_seed_and_hold_each_row_once(made_up, tmp_path):
    labels = made_up["label"].to_numpy()
    path = write(tmp_path / "log.tsv", made_up.assign(I1=np.arange(3000)))
    found = {}
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        folder = prepared(tmp_path / name, "criteo_kaggle", path, split="random", seed=seed)
        found[name] = [arrays_of(folder, part)[0] for part in PARTS]
        assert [len(arrays["label"]) for arrays in found[name]] == [2430, 270, 300]
        assert sum(arrays["label"].sum() for arrays in found[name]) == labels.sum()
    for one, again in zip(found["one"], found["again"], strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, again[name])
    assert not np.array_equal(found["one"][2]["label"], found["other"][2]["label"])
    learned = json.loads((tmp_path / "one/learned/learned.json").read_text())["ranges"]["I1"]
    train = found["one"][0]
    number = train["numbers"][:, 0] * (learned["high"] - learned["low"]) + learned["low"]
    rows = np.round(number).astype(int)
    assert np.all(np.diff(rows) > 0)
    np.testing.assert_array_equal(labels[rows], train["label"])


def test_highfreq_keeps_the_most_frequent_ids(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    folder = prepared(tmp_path / "out", "criteo_kaggle", path, split="highfreq", keep_ids=3)
    plain = prepared(tmp_path / "plain", "criteo_kaggle", path, split="random")
    assert all(entry["rows"] <= 5 for entry in manifest_of(folder)["fields"])
    for part in PARTS:
        few, many = (arrays_of(f, part)[0]["ids"] for f in (folder, plain))
        # The rows of a random split, with every further id in the row of rare ones.
        np.testing.assert_array_equal(few, np.where(many >= 5, 1, many))


@pytest.mark.parametrize(
    "options, test, validation",
    [
        ({"test_values": ["2024-01-02"]}, [2], []),
        ({"test_from": "2024-01-03"}, [3, 4], []),
        ({"test_from": "2024-01-04", "validation_values": ["2024-01-01"]}, [4], [1]),
    ],
)
def test_split_by_column(tmp_path, options, test, validation):
    frame = dated()
    fraction = {} if validation else {"validation_fraction": 0.0}
    folder = table(tmp_path, frame, **BY_DAY, **fraction, **options)
    day = frame["day"].str[-1].astype(int)
    parts = np.where(day.isin(test), 2, np.where(day.isin(validation), 1, 0))
    for number, part in enumerate(PARTS):
        labels = arrays_of(folder, part)[0].get("label", np.empty(0))
        np.testing.assert_array_equal(labels, frame["y"][parts == number])


@pytest.mark.parametrize("value", ["010", "08", "12:00", "2024-03-01", "1_000", "7"])
def test_values_of_a_column_are_taken_as_they_are_written(value):
    options = ["split=by_column", "split_column=c", f"test_from={value}", f"test_values=[{value}]"]
    split = from_key_values(options, Split, "--set")
    assert (split.test_from, split.test_values) == (value, [value])


def test_split_by_column_with_a_share_for_validation(tmp_path):
    frame = dated(2000)
    folder = table(tmp_path, frame, **BY_DAY, test_from="2024-01-04", validation_fraction=0.2)
    rest = (frame["day"] < "2024-01-04").sum()
    sizes = {part: len(arrays_of(folder, part)[0]["label"]) for part in PARTS}
    assert sizes["train"] + sizes["validation"] == rest
    assert 0.15 * rest < sizes["validation"] < 0.25 * rest


def test_split_by_files(made_up, tmp_path):
    train = write(tmp_path / "a.tsv", made_up[:1000])
    files = {
        "validation_path": write(tmp_path / "b.tsv", made_up[1000:1500]),
        "test_path": write(tmp_path / "c.tsv", made_up[1500:]),
    }
    folder = prepared(tmp_path / "out", "criteo_kaggle", train, split="files", **files)
    check_criteo(folder, made_up, np.repeat([0, 1, 2], [1000, 500, 1500]))


def test_an_empty_training_part_is_refused(tmp_path):
    empty = r"training part has no rows \(bad rows left out: 0\); write --set split=rand"
    with pytest.raises(DataError, match=empty):
        table(tmp_path, dated(50), **BY_DAY, test_from="2024", validation_fraction=0.0)
    assert not (tmp_path / "out").exists()
