"""What was learned from one log, applied to another."""

import json

import numpy as np
import polars as pl
import pytest

from stampede.data import DataError
from stampede.data.apply import apply_learned
from stampede.data.options import WritingOptions
from stampede.data.prepared.manifest import LEARNED_FOLDER
from support.mixed_log import write_mixed
from support.prepared_arrays import arrays_of, manifest_of
from support.preparing import PARTS, prepared, write
from support.tampering import sign_learned, swap_users


@pytest.fixture
def mixed(tmp_path):
    """A prepared folder, and the log it was made of."""
    write_mixed(tmp_path)
    log = str(tmp_path / "log.csv")
    schema = str(tmp_path / "schema.yaml")
    return prepared(tmp_path / "data", "table", log, schema=schema), log


def test_learned_vocabulary_gives_new_data_the_same_rows(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    first = prepared(tmp_path / "out", "criteo_kaggle", path)
    again = tmp_path / "again"
    apply_learned(first, path, WritingOptions(), again)
    whole = {
        name: np.concatenate([arrays_of(first, part)[0][name] for part in PARTS])
        for name in ("ids", "numbers", "label")
    }
    found, _ = arrays_of(again, "test")
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array)
    assert manifest_of(again)["parts"]["train"] == []


def no_rows(saved):
    saved["ranges"]["x"]["rows"] = 0


def more_rows_than_a_float_holds(saved):
    saved["ranges"]["x"]["rows"] = 10**400


def more_ids_than_can_be_counted(saved):
    saved["schema_"]["ids"]["tags"]["max_ids"] = 2**64


def negative_squares(saved):
    saved["ranges"]["x"]["squares"] = -1.0


def turned_range(saved):
    saved["ranges"]["z"].update(low=2.0, high=1.0)


def edges_that_fall(saved):
    saved["quantiles"]["age"].reverse()


def too_many_buckets(saved):
    saved["schema_"]["ids"]["site"]["buckets"] = 2**62 - 1


def absent_range(saved):
    del saved["ranges"]["x"]


def file_elsewhere(saved):
    saved["vocabularies"]["user"] = ".."


def many_files(saved):
    saved["vocabularies"]["user"] = "*.parquet"


@pytest.mark.parametrize(
    "change",
    [no_rows, more_rows_than_a_float_holds, more_ids_than_can_be_counted, negative_squares,
     turned_range, edges_that_fall, too_many_buckets, absent_range, file_elsewhere, many_files],
)  # fmt: skip
def test_what_was_learned_is_checked(mixed, change):
    folder, log = mixed
    path = folder / LEARNED_FOLDER / "learned.json"
    saved = json.loads(path.read_text())
    change(saved)
    path.write_text(json.dumps(saved))
    sign_learned(folder)
    with pytest.raises(DataError, match=r"learned.json: damaged \(.*prepare the data again"):
        apply_learned(folder, log, WritingOptions(), folder.parent / "out")


@pytest.mark.parametrize(
    "values, reason",
    [
        (["u1", "u1", "u2", "u3"], "an id appears twice"),
        (["u1", None, "u2", "u3"], "1 of them null"),
        ([1, 2, 3, 4], "holds Int64"),
        (["u1"], "holds 1 ids instead of 4"),
    ],
    ids=["twice", "null", "numbers", "fewer"],
)
def test_a_vocabulary_that_is_none(mixed, values, reason):
    folder, log = mixed
    pl.DataFrame({"value": values}).write_parquet(folder / LEARNED_FOLDER / "user.parquet")
    sign_learned(folder)
    with pytest.raises(DataError, match=rf"learned.json: damaged \(.*{reason}"):
        apply_learned(folder, log, WritingOptions(), folder.parent / "out")


def test_a_vocabulary_that_has_changed(mixed):
    folder, log = mixed
    swap_users(folder)
    path = folder / LEARNED_FOLDER / "user.parquet"
    with pytest.raises(DataError, match=rf"{path}: .* since the data were prepared; delete"):
        apply_learned(folder, log, WritingOptions(), folder.parent / "out")
    assert not (folder.parent / "out").exists()
