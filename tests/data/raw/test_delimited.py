"""Line ends, quotes, missing values, times and headers of delimited text."""

import polars as pl
import pytest

from stampede.data import DataError
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import MISSING, Schema
from support.raw_logs import GOOD, HEADER, SCHEMA, log_of, read, write


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", ["", "\n", "\n\r\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n"])
@pytest.mark.parametrize("head", ["", "\ufeff"])
def test_line_ends_blank_lines_at_the_end_and_a_bom(tmp_path, end, tail, head):
    path = tmp_path / "log.csv"
    text = head + end.join([HEADER, GOOD, GOOD, GOOD]) + tail
    path.write_bytes(text.encode())
    frame, numbers, _ = read(log_of(path))
    assert numbers.tolist() == [0, 1, 2]
    assert frame["user"].to_list() == ["anna"] * 3
    assert frame["#time"].to_list() == [1706659200] * 3
    assert log_of(path).counts() == [3]


@pytest.mark.usefixtures("block_bytes")
def test_quoted_cells(tmp_path):
    lines = [HEADER, '1,"a,""b""",3,0.5,1,2024-01-31', GOOD, '"0",",",3,"7",1,2024-01-31']
    frame, _, _ = read(log_of(write(tmp_path / "log.csv", lines)))
    assert frame["user"].to_list() == ['a,"b"', "anna", ","]
    assert frame["x"].to_list() == [0.5, 0.5, 7.0]
    lines = [HEADER, '"1","","","","1","2024-01-31"', "1,,,,1,2024-01-31"]
    frame, _, _ = read(log_of(write(tmp_path / "log.csv", lines)))
    assert frame.select("user", "slot", "x").null_count().row(0) == (2, 2, 2)
    with pytest.raises(DataError, match=r"line 3: found [23] columns"):
        read(log_of(write(tmp_path / "log.csv", [HEADER, GOOD, '1,"a,b']), quote=""))


@pytest.mark.parametrize("other", ["0.5", "foo"])
def test_an_empty_number_is_missing_whatever_else_is_in_the_block(tmp_path, other):
    lines = [HEADER, "1,anna,3,,1,2024-01-31", f"1,anna,3,{other},1,2024-01-31"]
    path = write(tmp_path / "log.csv", lines)
    frame, _, _ = read(log_of(path, missing=["NA"]), "skip")
    assert frame["x"].to_list()[0] is None


@pytest.mark.parametrize(
    "format, text, seconds",
    [
        ("%Y-%m-%d %T", "2024-03-05 17:30:01", 1709659801),
        ("%F %R", "2024-03-05 17:30", 1709659800),
        ("%d.%m.%Y", "05.03.2024", 1709596800),
        ("%y%m%d%H", "24030517", 1709658000),
        ("seconds", " 1709658000", 1709658000),
    ],
)
def test_forms_of_time(tmp_path, format, text, seconds):
    path = write(tmp_path / "log.csv", [HEADER, f"1,anna,3,0.5,1,{text}"])
    ids = {**SCHEMA["ids"], "hour": {"encode": "hour_of_day"}}
    frame, _, _ = read(log_of(path, time={"column": "t", "format": format}, ids=ids))
    assert frame["#time"].to_list() == [seconds]
    assert frame["hour"].to_list() == [seconds % 86400 // 3600]


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("mark", [mark for mark in MISSING if mark])
@pytest.mark.parametrize("quoted", [False, True])
def test_marks_of_missing_values_are_counted(tmp_path, mark, quoted):
    cell = f'"{mark}"' if quoted else mark
    lines = [HEADER, GOOD, f"1,{cell},3,0.5,1,2024-01-31", f"1,x{mark},{cell},-1,1,2024-01-31"]
    lines += [f"0,{mark}x,4,{cell},1,2024-01-31", f"1,{cell},,{cell},1,2024-01-31"]
    bad = BadRows("error")
    frame = pl.concat(
        chunk.frame for chunk in log_of(write(tmp_path / "log.csv", lines)).chunks(bad)
    )
    assert frame["user"].to_list() == ["anna", None, f"x{mark}", f"{mark}x", None]
    assert frame["slot"].to_list() == [3, 3, None, 4, None]
    assert frame["x"].to_list() == [0.5, 0.5, -1, None, None]
    assert bad.marks_by_column() == {"user": {mark: 2}, "x": {mark: 2}, "slot": {mark: 1}}


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("encode", ["vocabulary", "hash"])
def test_marks_among_several_ids_are_left_out_and_counted(tmp_path, form, encode):
    cells = ["a|NA|b", "NA|-|null", "x-NA|NAN|b", "NaN|a|b|c", "a|null", "NA", "b"]
    frame = pl.DataFrame({"y": [0, 1, 0, 1, 0, 1, 0], "tags": cells})
    path = tmp_path / f"log.{form}"
    if form == "csv":
        frame.write_csv(path)
    else:
        frame.with_columns(pl.col("tags").str.split("|")).write_parquet(path)
    tags = {"separator": "|", "max_ids": 2, "encode": encode}
    tags |= {"buckets": 5} if encode == "hash" else {}
    log = RawLog(Schema.model_validate({"label": "y", "ids": {"tags": tags}}), [path])
    bad = BadRows("error")
    (chunk,) = log.chunks(bad)
    kept = [ids or [] for ids in chunk.frame["tags"].to_list()]
    assert kept == [["a", "b"], [], ["x-NA", "NAN"], ["a", "b"], ["a"], [], ["b"]]
    assert bad.marks_by_column() == {"tags": {"NA": 3, "null": 2, "-": 1, "NaN": 1}}


def test_files_may_have_their_columns_in_another_order(tmp_path):
    one = write(tmp_path / "a.csv", [HEADER, GOOD])
    two = write(tmp_path / "b.csv", ["t,extra,w,x,slot,user,y", "2024-01-31,?,2,7,4,ben,0"])
    log = RawLog(Schema.model_validate(SCHEMA), [one, two])
    frame, numbers, _ = read(log)
    assert frame.drop("#time").rows() == [(1.0, 0.5, "anna", 3, 1.0), (0.0, 7.0, "ben", 4, 2.0)]
    assert numbers.tolist() == [0, 0]
    assert [chunk.file for chunk in log.chunks(BadRows("error"))] == [0, 1]


@pytest.mark.parametrize(
    "header, words",
    [
        ("y,user,slot,x,w", "no column 't'"),
        ("y,y,user,slot,x,w,t", "column 'y' appears twice in the header; give the columns diff"),
        ("1,anna,3,0.5,1,2024-01-31", r"column '1' appears twice.*`columns: \[label, user, item\]"),
        ("y;user;slot;x;w;t", "no column 'slot'; its header line has y;user.*`separator`"),
    ],
)
def test_headers_that_do_not_fit(tmp_path, header, words):
    with pytest.raises(DataError, match=words):
        read(log_of(write(tmp_path / "log.csv", [header, GOOD])))
