"""Values that a person writes into a schema or a configuration match cells of the same value."""

import runpy
import shutil
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pytest

from stampede.data import DataError
from stampede.data.formulas import (
    JSON,
    fitting_format,
    seconds_of_time,
    split,
    too_coarse,
    written_alike,
)
from stampede.data.raw.typed import typed_label
from stampede.data.schema.schema import Label
from stampede.data.split import _as_in_cells
from stampede.engine.inference.frames import _of_objects
from support.paths import ROOT


@pytest.mark.parametrize("given", [[1234567, 3], [1234567.0, "3"], ["1234567", "3.0"]])
def test_positive_labels_of_any_form(given):
    label = Label(column="stars", positive=given)
    # As preparation writes cells such as 3.0.
    cells = pl.Series("stars", ["1234567", "3", "4"])
    typed = typed_label(label, pl.Schema({"stars": pl.String}))
    assert cells.to_frame().select(typed.values).to_series().to_list() == [1, 1, 0]


def test_values_of_a_split_column():
    assert "7" in _as_in_cells(["7.0", "8.5"]) and "8.5" in _as_in_cells(["7.0", "8.5"])


def test_decimals_of_a_frame_are_those_of_a_file(tmp_path):
    for file in ("data/formulas.py", "engine/inference/package/encode.py"):
        shutil.copy(ROOT / file, tmp_path)
    alike = runpy.run_path(str(tmp_path / "encode.py"))["_alike"]
    values = [Decimal("45.50"), Decimal("45.00"), Decimal("100"), Decimal("0.10")]
    file, _ = written_alike(pl.Series("id", values, dtype=pl.Decimal(9, 2)))
    assert file.to_list() == ["45.5", "45", "100", "0.1"]
    assert _of_objects("id", values).to_list() == file.to_list()
    mixed = pl.Series("id", alike("id", [*values, "x"]), strict=False).cast(pl.String)
    assert mixed.to_list()[:-1] == file.to_list()


def test_hours_as_digits_are_no_seconds():
    hours = pl.Series("t", [2026030112, 2026123123])
    assert fitting_format(hours) == "%Y%m%d%H"
    found = hours.to_frame().select(seconds_of_time("t", pl.Int64, "%Y%m%d%H")).to_series()
    expected = pd.to_datetime(hours.to_list(), format="%Y%m%d%H")
    assert found.to_list() == [int(time.timestamp()) for time in expected]
    as_seconds = hours.to_frame().select(seconds_of_time("t", pl.Int64, "seconds")).to_series()
    assert as_seconds.to_list() == [None, None]
    now = pl.Series("t", [1772668806, 1800000000])
    assert fitting_format(now) == "seconds"


def test_fractions_of_seconds_are_cut_off_whatever_the_type():
    for values in ([Decimal("1772668799.6")], [1772668799.6], ["1772668799.6"]):
        frame = pl.DataFrame({"t": values})
        kind = frame.schema["t"]
        assert frame.select(seconds_of_time("t", kind, "seconds")).item() == 1772668799


def test_floats_of_an_object_column_stay_floats():
    """So that ids that lost digits are refused as those of a file are."""
    found = _of_objects("id", [2.0**60, None, 3.0])
    assert found.dtype == pl.Float64 and too_coarse(found).to_list() == [True, False, False]
    lists = _of_objects("id", [[2.0**60, 1.0], [], None])
    assert lists.dtype == pl.List(pl.Float64) and lists.to_list() == [[2.0**60, 1.0], [], None]
    assert _of_objects("id", [3.0, "x", 7]).to_list() == ["3", "x", "7"]


def test_nan_is_no_large_id():
    assert too_coarse(pl.Series([1.0, float("nan"), 2.0**60])).to_list() == [False, False, True]
    with pytest.raises(DataError, match="column 'id'"):
        _of_objects("id", [np.float64(1), object()])


def test_numbers_of_json_lists_are_their_values():
    cells = pl.Series("c", ['[1e3, 1.50, -0, 100, "1e3", true, 12345678901234567890]', "[1.0e2]"])
    found = cells.to_frame().select(split(pl.col("c"), JSON))["c"].to_list()
    assert found == [["1000", "1.5", "0", "100", "1e3", "true", "12345678901234567890"], ["100"]]
