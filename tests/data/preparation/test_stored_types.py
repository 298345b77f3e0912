"""Types that numbers and ids are stored in."""

import numpy as np
import pytest

from stampede.data import DataError
from support.prepared_arrays import arrays_of
from support.preparing import dated, numbers_by_pandas, prepared, sequential_parts, table, write


def test_float16_numbers(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    folder = prepared(tmp_path / "out", "criteo_kaggle", path, numbers_dtype="float16")
    expected = numbers_by_pandas(made_up, sequential_parts(3000, 1 / 7, 0.1) == 0)[:300]
    found = arrays_of(folder, "train")[0]["numbers"][:300]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_numbers_too_large_for_float16(tmp_path):
    frame = dated().assign(x=70_000)
    schema = "label: y\nids: [user]\nnumbers: {x: {transform: []}}\n"
    with pytest.raises(DataError, match=r"number x: found 70000 .*data.numbers_dtype=float32"):
        table(tmp_path, frame, schema, numbers_dtype="float16")


def test_wide_tables_have_wide_ids(tmp_path):
    frame = dated()
    schema = f"label: y\nids:\n  user: {{encode: integer, size: {2**40}}}\n"
    folder = table(tmp_path, frame.assign(user=frame["user"] + 2**35), schema)
    found = arrays_of(folder, "train")[0]["ids"]
    assert found.dtype == np.int64
    assert found.min() >= 2**35
