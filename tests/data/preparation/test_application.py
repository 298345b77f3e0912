"""What was learned from one log, applied to another."""

import numpy as np

from stampede.data.application import apply_learned
from stampede.data.writing import WritingOptions
from support.prepared_arrays import arrays_of, manifest_of
from support.preparing import PARTS, prepared, write


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
