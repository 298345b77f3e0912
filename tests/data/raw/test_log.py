"""Typed rows of raw logs: bad ones, delimited text and Parquet, logs whose rows are scored."""

import json
from datetime import timedelta

import polars as pl
import pytest

from stampede.data import DataError
from stampede.data.raw import files as blocks
from stampede.data.raw.log import RawLog, scoring_log
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import CRITEO, MISSING, Schema
from support.raw_logs import GOOD, HEADER, SCHEMA, log_of, read, write


@pytest.fixture(params=[16, 1 << 20], ids=["tiny blocks", "one block"])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", request.param)


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
        ("user", [timedelta(1)] * 3),
        ("day", [timedelta(1)] * 3),
        ("day", [[1], [2], [3]]),
        ("t", [1.5, 2.5, 3.5]),
    ],
)
def test_types_of_parquet_columns_that_do_not_fit(tmp_path, column, values):
    path = tmp_path / "log.parquet"
    pl.DataFrame({**PARQUET, column: values}).write_parquet(path)
    log = RawLog(log_of(path).schema, [path], split_column="day" if column == "day" else None)
    with pytest.raises(DataError, match=rf"log.parquet: column {column} is stored as"):
        read(log)


def test_a_struct_is_refused_with_the_names_of_what_is_in_it(tmp_path):
    path = tmp_path / "log.parquet"
    orders = [[{"item": "i1", "price": 2.5}], [], []]
    pl.DataFrame({**PARQUET, "user": orders}).write_parquet(path)
    with pytest.raises(DataError, match=r"name user\.item or user\.price in the schema"):
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


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", ["", "\n", "\n\r\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n"])
@pytest.mark.parametrize("head", ["", "\ufeff"])
def test_line_ends_blank_lines_at_the_end_and_a_bom(tmp_path, end, tail, head):
    path = tmp_path / "log.csv"
    path.write_bytes((head + end.join([HEADER, GOOD, GOOD, GOOD]) + tail).encode())
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
