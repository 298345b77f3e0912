"""Typed rows: bad ones, Parquet files, logs whose rows are scored."""

import json

import polars as pl
import pytest

from stampede.data import DataError
from stampede.data.raw.log import scoring_log
from stampede.data.schema.schema import CRITEO, Schema
from support.raw_logs import GOOD, HEADER, SCHEMA, log_of, read, write

BAD = {
    "2,anna,3,0.5,1,2024-01-31": ("y", "2", "write 0 or 1"),
    ",anna,3,0.5,1,2024-01-31": ("y", "nothing", "write 0 or 1"),
    "1,anna,3,five,1,2024-01-31": ("x", "'five'", "finite number"),
    "1,an\0na,3,0.5,1,2024-01-31": ("", "a NUL byte", "6 columns"),
    "1,anna,3,1e999,1,2024-01-31": ("x", "inf", "finite number"),
    "1,anna,3,-nan,1,2024-01-31": ("x", "'-nan'", "finite number"),
    "1,anna,10,0.5,1,2024-01-31": ("slot", "'10'", "0 to 9"),
    "1,anna,3.5,0.5,1,2024-01-31": ("slot", "'3.5'", "0 to 9"),
    "1,anna,3,0.5,-1,2024-01-31": ("w", "-1", "from 0 to"),
    "1,anna,3,0.5,,2024-01-31": ("w", "nothing", "from 0 to"),
    "1,anna,3,0.5,1,31.01.2024": ("t", "'31.01.2024'", "%Y-%m-%d"),
    "1,anna,3,0.5,1": ("", "5 columns", "6 columns"),
    "1,anna,3,0.5,1,2024-01-31,": ("", "7 columns", "6 columns"),
    '1,"anna,b",3,0.5,1': ("", "5 columns", "6 columns"),
    '1,an"na,3,0.5,1,2024-01-31': ("", "a quote that is not closed", "6 columns"),
    "1,anna,3,1e39,1,2024-01-31": ("x", "1e+39", "finite number up to 3.4e+38"),
    "1,an\udcffna,3,0.5,1,2024-01-31": ("", "not UTF-8", "6 columns"),
}


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_is_an_error_or_left_out(tmp_path, bad):
    column, found, remedy = BAD[bad]
    lines = [HEADER, *[GOOD] * 3, bad, GOOD, bad, GOOD]
    path = tmp_path / "log.csv"
    path.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))
    log = log_of(path)
    with pytest.raises(DataError) as raised:
        read(log)
    sentence = str(raised.value)
    place = f"{path}: line 5, column {column}: " if column else f"{path}: line 5: "
    assert sentence.startswith(place)
    assert found in sentence and remedy in sentence and "--set on_bad_row=skip" in sentence

    aside = tmp_path / "bad.jsonl"
    frame, numbers, count = read(log, "skip", aside)
    assert count == 2 and len(frame) == 5
    assert numbers.tolist() == [0, 1, 2, 4, 6]
    entries = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [entry["line"] for entry in entries] == [5, 7]
    shown = bad.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    assert all(entry["text"] == shown and entry["file"] == str(path) for entry in entries)


@pytest.mark.usefixtures("block_bytes")
def test_a_long_and_a_short_line_do_not_cancel_out(tmp_path):
    path = write(tmp_path / "log.csv", [HEADER, GOOD, GOOD + ",9", GOOD.rpartition(",")[0], GOOD])
    with pytest.raises(DataError, match="line 3: found 7 columns"):
        read(log_of(path))
    assert read(log_of(path), "skip")[1].tolist() == [0, 3]


def test_many_bad_rows(tmp_path):
    # Work for each that grows with the block would take minutes.
    path = write(tmp_path / "log.csv", [HEADER, *["7" + GOOD[1:]] * 60_000, GOOD])
    _, numbers, count = read(log_of(path), "skip")
    assert (numbers.tolist(), count) == ([60_000], 60_000)


def test_bad_rows_of_parquet(tmp_path):
    path = tmp_path / "log.parquet"
    columns = dict(zip(HEADER.split(","), GOOD.split(","), strict=True))
    frame = pl.DataFrame({name: [value] * 5 for name, value in columns.items()})
    frame = frame.with_columns(pl.Series("x", [1.0, None, float("nan"), 2.0, float("inf")]))
    frame.write_parquet(path)
    with pytest.raises(DataError, match="line 3, column x: found nan"):
        read(log_of(path, missing=[""]))
    assert read(log_of(path, missing=[""]), "skip")[1].tolist() == [0, 1, 3]
    with pytest.raises(DataError, match="line 5, column x: found inf"):
        read(log_of(path))


PARQUET = {
    "y": [1, 0, 1],
    "user": ["anna", "NA", None],
    "slot": [1, 2, None],
    "x": [0.5, None, 2.0],
    "w": [1.0, 2.0, 3.0],
    "t": ["2024-01-31"] * 3,
}


@pytest.mark.parametrize(
    "column, kind",
    [
        ("user", pl.Categorical),
        ("y", pl.Boolean),
        ("x", pl.Decimal(10, 2)),
        ("t", pl.Date),
        ("t", pl.Datetime("ms")),
    ],
)
def test_types_of_parquet_columns(tmp_path, column, kind):
    frame = pl.DataFrame(PARQUET)
    values = frame[column]
    if column == "t":
        values = values.str.to_date()
    path = tmp_path / "log.parquet"
    frame.with_columns(values.cast(kind)).write_parquet(path)
    found, _, _ = read(log_of(path, missing=["", "NA"]))
    assert found["user"].to_list() == ["anna", None, None]
    assert found["slot"].to_list() == [1, 2, None] and found["x"].to_list() == [0.5, None, 2.0]
    assert found["#label"].to_list() == [1.0, 0.0, 1.0]
    assert found["#time"].to_list() == [1706659200] * 3


@pytest.mark.parametrize(
    "column, values",
    [
        ("y", [[1], [0], [1]]),
        ("x", [b"1", b"2", b"3"]),
        ("user", [["a"], ["b"], []]),
        ("t", [1.5, 2.5, 3.5]),
    ],
)
def test_types_of_parquet_columns_that_do_not_fit(tmp_path, column, values):
    path = tmp_path / "log.parquet"
    pl.DataFrame({**PARQUET, column: values}).write_parquet(path)
    with pytest.raises(DataError, match=rf"log.parquet: column {column} is stored as"):
        read(log_of(path))


def test_the_label_of_a_log_that_is_scored_is_read_unless_absent_or_unwanted(tmp_path):
    schema, inputs = Schema.model_validate(SCHEMA), ["x", "user", "slot"]
    path = write(tmp_path / "log.csv", [HEADER, GOOD])
    frame, _, _ = read(scoring_log(schema, [path]))
    assert frame.columns == ["#label", *inputs, "#weight"]
    assert frame["#label"].to_list() == [1.0]
    write(path, [HEADER, GOOD.replace("1,", "unknown,", 1)])
    with pytest.raises(DataError, match="write 0 or 1"):
        read(scoring_log(schema, [path]))
    frame, _, _ = read(scoring_log(schema, [path], with_label=False))
    assert frame.columns == inputs and len(frame) == 1
    write(path, ["user,slot,x", "anna,3,0.5"])
    frame, _, _ = read(scoring_log(schema, [path]))
    assert frame.columns == inputs and frame.rows() == [(0.5, "anna", 3)]


def test_line_1_of_a_file_without_header_shows_whether_it_has_labels(tmp_path):
    values = [*map(str, range(13)), *(f"id{i}" for i in range(26))]
    lines = ["\t".join(values)] * 2
    found = read(scoring_log(CRITEO, [write(tmp_path / "test.txt", lines)]))[0]
    assert "#label" not in found.columns
    assert found["I1"].to_list() == [0.0, 0.0] and found["C26"].to_list() == ["id25"] * 2
    labelled = read(scoring_log(CRITEO, [write(tmp_path / "l.txt", ["1\t" + lines[0]])]))[0]
    assert labelled["#label"].to_list() == [1.0] and labelled["I1"].to_list() == [0.0]
    with pytest.raises(DataError, match="line 1: found 38 columns; write 40 columns"):
        read(scoring_log(CRITEO, [write(tmp_path / "s.txt", ["\t".join(values[1:])])]))
    (tmp_path / "empty.txt").touch()
    assert list(scoring_log(CRITEO, [tmp_path / "empty.txt"]).chunks(None)) == []
