"""Values that a person writes into a schema or a configuration match cells of the same value."""

import runpy
import shutil
from decimal import Decimal

import pandas as pd
import polars as pl

from stampede.data.formulas import (
    JSON,
    fitting_format,
    seconds_of_time,
    split,
    written_alike,
)
from stampede.engine.inference.frames import _of_objects
from support.paths import ROOT


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


def test_numbers_of_json_lists_are_their_values():
    cells = pl.Series("c", ['[1e3, 1.50, -0, 100, "1e3", true, 12345678901234567890]', "[1.0e2]"])
    found = cells.to_frame().select(split(pl.col("c"), JSON))["c"].to_list()
    assert found == [["1000", "1.5", "0", "100", "1e3", "true", "12345678901234567890"], ["100"]]
