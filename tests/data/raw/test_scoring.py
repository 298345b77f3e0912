"""Logs whose rows are scored: label, weight and time may be absent."""

import gzip

import polars as pl
import pytest

from stampede.data import DataError
from stampede.data.raw.log import scoring_log
from stampede.data.schema.schema import CRITEO, Schema
from support.raw_logs import GOOD, HEADER, SCHEMA, read, write

INPUTS = ["x", "user", "slot"]


def schema_of(**changes):
    return Schema.model_validate({**SCHEMA, **changes})


def without(line, *columns):
    cells = dict(zip(HEADER.split(","), line.split(","), strict=True))
    return ",".join(value for name, value in cells.items() if name not in columns)


def test_what_the_file_has_is_read(tmp_path):
    path = write(tmp_path / "log.csv", [HEADER, GOOD])
    frame, _, _ = read(scoring_log(schema_of(), [path]))
    assert frame.columns == ["#label", *INPUTS, "#weight"]
    assert frame["#label"].to_list() == [1.0]


@pytest.mark.parametrize("form", ["csv", "csv.gz", "parquet"])
def test_a_log_without_label_weight_and_time_has_its_inputs(tmp_path, form):
    lines = [without(line, "y", "w", "t") for line in (HEADER, GOOD, GOOD)]
    path = write(tmp_path / "plain.csv", lines)
    if form == "parquet":
        path = tmp_path / "log.parquet"
        pl.read_csv(tmp_path / "plain.csv").write_parquet(path)
    elif form == "csv.gz":
        path = tmp_path / "log.csv.gz"
        path.write_bytes(gzip.compress((tmp_path / "plain.csv").read_bytes()))
    frame, numbers, _ = read(scoring_log(schema_of(), [path]))
    assert frame.columns == INPUTS
    assert frame.rows() == [(0.5, "anna", 3)] * 2
    assert numbers.tolist() == [0, 1]


def test_a_label_that_is_not_wanted_is_not_looked_at(tmp_path):
    path = write(tmp_path / "log.csv", [HEADER, GOOD.replace("1,", "unknown,", 1)])
    with pytest.raises(DataError, match="write 0 or 1"):
        read(scoring_log(schema_of(), [path]))
    frame, _, _ = read(scoring_log(schema_of(), [path], with_label=False))
    assert frame.columns == INPUTS and len(frame) == 1


def test_a_time_that_an_input_is_made_of_is_needed(tmp_path):
    timed = schema_of(ids={**SCHEMA["ids"], "day": {"encode": "weekday"}})
    path = write(tmp_path / "log.csv", [HEADER, GOOD])
    frame, _, _ = read(scoring_log(timed, [path]))
    assert frame["day"].to_list() == [2]  # a Wednesday
    path = write(tmp_path / "log.csv", [without(line, "t") for line in (HEADER, GOOD)])
    with pytest.raises(DataError, match="no column 't'"):
        read(scoring_log(timed, [path]))


def test_an_absent_input_is_named(tmp_path):
    path = write(tmp_path / "log.csv", [without(line, "user") for line in (HEADER, GOOD)])
    with pytest.raises(DataError, match="no column 'user'; its header line has y, slot"):
        read(scoring_log(schema_of(), [path]))


def test_the_first_line_of_a_file_without_header_tells_whether_the_label_is_there(tmp_path):
    values = [*map(str, range(13)), *(f"id{i}" for i in range(26))]
    lines = ["\t".join(values)] * 2
    found = read(scoring_log(CRITEO, [write(tmp_path / "test.txt", lines)]))[0]
    assert "#label" not in found.columns
    assert found["I1"].to_list() == [0.0, 0.0] and found["C26"].to_list() == ["id25"] * 2
    labelled = read(scoring_log(CRITEO, [write(tmp_path / "l.txt", ["1\t" + lines[0]])]))[0]
    assert labelled["#label"].to_list() == [1.0] and labelled["I1"].to_list() == [0.0]
    with pytest.raises(DataError, match="line 1: found 38 columns; a line must hold 40"):
        read(scoring_log(CRITEO, [write(tmp_path / "s.txt", ["\t".join(values[1:])])]))


def test_an_empty_file_has_no_rows(tmp_path):
    path = tmp_path / "log.txt"
    path.write_bytes(b"")
    assert list(scoring_log(CRITEO, [path]).chunks(None)) == []
