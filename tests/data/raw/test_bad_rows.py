"""Bad rows: named with file and line, or left out."""

import json

import polars as pl
import pytest

from stampede.data import DataError
from support.raw_logs import GOOD, HEADER, log_of, read, write

BAD = {
    "2,anna,3,0.5,1,2024-01-31": ("y", "2", "write 0 or 1"),
    ",anna,3,0.5,1,2024-01-31": ("y", "nothing", "write 0 or 1"),
    "yes,anna,3,0.5,1,2024-01-31": ("y", "'yes'", "write 0 or 1"),
    "1,anna,3,five,1,2024-01-31": ("x", "'five'", "finite number"),
    "1,anna,3,-nan,1,2024-01-31": ("x", "nan", "finite number"),
    "1,an\0na,3,0.5,1,2024-01-31": ("", "a NUL byte", "6 columns"),
    "1,anna,3,1e999,1,2024-01-31": ("x", "inf", "finite number"),
    "1,anna,10,0.5,1,2024-01-31": ("slot", "'10'", "0 to 9"),
    "1,anna,-1,0.5,1,2024-01-31": ("slot", "'-1'", "0 to 9"),
    "1,anna,3.5,0.5,1,2024-01-31": ("slot", "'3.5'", "0 to 9"),
    "1,anna,3,0.5,-1,2024-01-31": ("w", "-1", "from 0 to"),
    "1,anna,3,0.5,,2024-01-31": ("w", "nothing", "from 0 to"),
    "1,anna,3,0.5,1,31.01.2024": ("t", "'31.01.2024'", "%Y-%m-%d"),
    "1,anna,3,0.5,1": ("", "5 columns", "6 columns"),
    "1,anna,3,0.5,1,2024-01-31,": ("", "7 columns", "6 columns"),
    '1,"anna,b",3,0.5,1': ("", "5 columns", "6 columns"),
    '1,an"na,3,0.5,1,2024-01-31': ("", "a quote without its counterpart", "6 columns"),
    "1,anna,3,1e39,1,2024-01-31": ("x", "1e+39", "finite number up to 3.4e+38"),
    "1,anna,3,0.5,1e39,2024-01-31": ("w", "1e+39", "from 0 to 3.4e+38"),
    "": ("", "1 columns", "6 columns"),
    "1,an\udcffna,3,0.5,1,2024-01-31": ("", "no UTF-8", "6 columns"),
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
def test_a_long_and_a_short_line_do_not_make_up_for_each_other(tmp_path):
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
    frame = frame.with_columns(pl.Series("user", ["a", "N\0", None, "\0", "e"]), x=1.0)
    frame.write_parquet(path)
    with pytest.raises(DataError, match="line 2: found a text with a NUL byte"):
        read(log_of(path))
    assert read(log_of(path), "skip")[1].tolist() == [0, 2, 4]
