"""Logs of Criteo and Avazu against an independent computation with pandas."""

import gzip

import numpy as np
import pandas as pd
import pytest

from stampede.settings import SettingsError
from support.paths import shared
from support.prepared_arrays import arrays_of, manifest_of
from support.preparing import (
    IDS,
    NUMBERS,
    PARTS,
    check_criteo,
    prepared,
    rows_by_pandas,
    sequential_parts,
    write,
)


@pytest.mark.parametrize("validation", [0.0, 0.1])
def test_criteo_sequential(made_up, tmp_path, validation):
    path = write(tmp_path / "log.tsv", made_up)
    folder = prepared(tmp_path / "out", "criteo_kaggle", path, validation_fraction=validation)
    check_criteo(folder, made_up, sequential_parts(3000, 1 / 7, validation))


def test_real_criteo_rows(tmp_path):
    log = shared("data/criteo_kaggle_137k.tsv.gz")
    frame = pd.read_csv(
        log, sep="\t", names=["label", *NUMBERS, *IDS], dtype=dict.fromkeys(IDS, "str")
    )
    folder = prepared(tmp_path / "out", "criteo_kaggle", str(log))
    check_criteo(folder, frame, sequential_parts(len(frame), 1 / 7, 0.1))


@pytest.mark.parametrize("split_hour", [False, True])
def test_real_avazu_rows(tmp_path, split_hour):
    log = shared("data/avazu_20k.csv.gz")
    frame = pd.read_csv(log, dtype=str)
    folder = prepared(tmp_path / "out", "avazu", str(log), split_hour=split_hour)
    parts = sequential_parts(len(frame), 0.1, 0.1)
    manifest = manifest_of(folder)
    time = pd.to_datetime(frame["hour"], format="%y%m%d%H")
    columns = [c for c in frame.columns if c not in ("id", "click", "hour")]
    expected = {} if split_hour else {"hour": rows_by_pandas(frame["hour"], parts == 0)[0]}
    if split_hour:
        expected = {"hour_of_day": time.dt.hour, "weekday": time.dt.weekday}
    for name in columns:
        expected[name], _ = rows_by_pandas(frame[name], parts == 0)
    assert [entry["name"] for entry in manifest["fields"]] == list(expected)
    for number, part in enumerate(PARTS):
        found, _ = arrays_of(folder, part)
        np.testing.assert_array_equal(found["ids"], pd.DataFrame(expected)[parts == number])
        np.testing.assert_array_equal(found["label"], frame["click"][parts == number].astype(int))
        np.testing.assert_array_equal(
            found["time"], time[parts == number].astype("datetime64[s]").astype("int64")
        )
        assert found["numbers"].shape == (sum(parts == number), 0)


def test_criteo_1tb_is_tested_on_its_last_file(made_up, tmp_path):
    # Natural order: day_10 is after day_2.
    for day, rows in ((1, slice(0, 700)), (2, slice(700, 2000)), (10, slice(2000, 3000))):
        with gzip.open(tmp_path / f"day_{day}.gz", "wt") as file:
            made_up[rows].to_csv(file, sep="\t", header=False, index=False)
    folder = prepared(tmp_path / "out", "criteo_1tb", str(tmp_path / "day_*.gz"))
    check_criteo(folder, made_up, np.repeat([0, 1, 2], [1800, 200, 1000]))


def test_one_day_of_criteo_1tb_has_no_last_file(made_up, tmp_path):
    path = write(tmp_path / "day_0", made_up)
    with pytest.raises(
        SettingsError, match=r"day_0 is the only one; write --set test_fraction=0\.1"
    ):
        prepared(tmp_path / "out", "criteo_1tb", path)
    folder = prepared(tmp_path / "out", "criteo_1tb", path, test_fraction=0.5)
    check_criteo(folder, made_up, sequential_parts(3000, 0.5, 0.1))
