"""What was learned from one log, applied to another."""

import numpy as np
import pytest

from stampede.data import DataError
from stampede.data.apply import apply_learned
from stampede.data.options import WritingOptions
from stampede.data.prepared.manifest import LEARNED_FOLDER
from support.movie_runs import prepared_movies
from support.prepared_arrays import arrays_of, manifest_of
from support.preparing import PARTS, prepared, write
from support.tampering import swap_users


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


def test_a_changed_vocabulary_is_refused(tmp_path):
    folder = prepared_movies(tmp_path)
    swap_users(folder)
    path = folder / LEARNED_FOLDER / "user.parquet"
    with pytest.raises(DataError, match=rf"{path}: .* since the data were prepared; delete"):
        apply_learned(folder, str(tmp_path / "log.csv"), WritingOptions(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
