"""Reading raw logs: line numbers, bad rows, damaged files."""

import gzip
import json

import numpy as np
import polars as pl
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.data import DataError
from stampede.data.raw import BadRows, RawLog, blocks, expand
from stampede.data.raw.blocks import count_lines, read_blocks
from stampede.data.schema import Schema

SCHEMA = {
    "label": "y",
    "ids": {"user": {}, "slot": {"encode": "integer", "size": 10}},
    "numbers": ["x"],
    "weight": "w",
    "time": {"column": "t", "format": "%Y-%m-%d"},
}
HEADER = "y,user,slot,x,w,t"
GOOD = "1,anna,3,0.5,1,2024-01-31"


@pytest.fixture(params=[16, 1 << 20], ids=["tiny blocks", "one block"])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", request.param)


def log_of(path, **changes):
    return RawLog(Schema.model_validate({**SCHEMA, **changes}), [path])


def write(path, lines, end="\n"):
    path.write_bytes(end.join(lines).encode() + end.encode())
    return path


def read(log, policy="error", aside=None):
    bad = BadRows(policy, aside)
    chunks = list(log.chunks(bad))
    frame = pl.concat([chunk.frame for chunk in chunks])
    numbers = np.concatenate([chunk.numbers for chunk in chunks])
    return frame, numbers, bad.count


BAD = {
    "2,anna,3,0.5,1,2024-01-31": ("y", "2", "write 0 or 1"),
    ",anna,3,0.5,1,2024-01-31": ("y", "nothing", "write 0 or 1"),
    "yes,anna,3,0.5,1,2024-01-31": ("y", "'yes'", "write 0 or 1"),
    "1,anna,3,five,1,2024-01-31": ("x", "'five'", "finite number"),
    "1,anna,3,nan,1,2024-01-31": ("x", "nan", "finite number"),
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
    assert found in sentence and remedy in sentence and "on_bad_row=skip" in sentence

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
    with pytest.raises(DataError, match=r"line 3: found [23] columns"):
        read(log_of(write(tmp_path / "log.csv", [HEADER, GOOD, '1,"a,b']), quote=""))


def test_quoted_cells_may_be_empty(tmp_path):
    lines = [HEADER, '"1","","","","1","2024-01-31"', "1,,,,1,2024-01-31"]
    frame, _, _ = read(log_of(write(tmp_path / "log.csv", lines)))
    assert frame.select("user", "slot", "x").null_count().row(0) == (2, 2, 2)


@pytest.mark.parametrize("other", ["0.5", "foo"])
def test_an_empty_number_is_missing_whatever_else_is_in_the_block(tmp_path, other):
    lines = [HEADER, "1,anna,3,,1,2024-01-31", f"1,anna,3,{other},1,2024-01-31"]
    path = write(tmp_path / "log.csv", lines)
    frame, _, _ = read(log_of(path, missing=["NA"]), "skip")
    assert frame["x"].to_list()[0] is None


def test_many_bad_rows(tmp_path):
    # Work for each that grows with the block would take minutes.
    path = write(tmp_path / "log.csv", [HEADER, *["7" + GOOD[1:]] * 60_000, GOOD])
    _, numbers, count = read(log_of(path), "skip")
    assert (numbers.tolist(), count) == ([60_000], 60_000)


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


def test_missing_values_and_other_words_for_them(tmp_path):
    lines = [HEADER, "1,,,,1,2024-01-31", "1,NA,NA,NA,1,2024-01-31"]
    path = write(tmp_path / "log.csv", lines)
    with pytest.raises(DataError, match=r"line 3, column (x|slot): found 'NA'"):
        read(log_of(path))
    frame, _, _ = read(log_of(path, missing=["", "NA"]))
    assert frame.select("user", "slot", "x").null_count().row(0) == (2, 2, 2)


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
    [("y,user,slot,x,w", "no column 't'"), ("y,y,user,slot,x,w,t", "column 'y' stands twice")],
)
def test_headers_that_do_not_fit(tmp_path, header, words):
    with pytest.raises(DataError, match=words):
        read(log_of(write(tmp_path / "log.csv", [header, GOOD])))


# Damaged files


def compressed(path, lines, keep):
    """A compressed file of which only a share is left."""
    text = ("\n".join(lines) + "\n").encode()
    if path.suffix == ".gz":
        whole = gzip.compress(text)
    else:
        whole = bytes(pyarrow.Codec("zstd").compress(text))
    path.write_bytes(whole[: int(len(whole) * keep)])
    return path


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("block_bytes", [1 << 14, 1 << 24])
def test_truncated_compressed_files(tmp_path, monkeypatch, suffix, block_bytes):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    draw = np.random.default_rng(0)
    lines = [f"1,{user},3,0.5,1,2024-01-31" for user in draw.integers(0, 10**9, 30_000)]
    whole = compressed(tmp_path / f"whole.csv.{suffix}", [HEADER, *lines], 1.0)
    assert len(read(log_of(whole))[0]) == 30_000
    cut = compressed(tmp_path / f"cut.csv.{suffix}", [HEADER, *lines], 0.6)
    with pytest.raises(DataError, match=r"cut.csv.*damaged or truncated.*download it again"):
        read(log_of(cut))
    aside = tmp_path / "bad.jsonl"
    frame, _, count = read(log_of(cut), "skip", aside)
    assert count == 1 and 10_000 < len(frame) < 20_000
    assert frame["user"].to_list() == [line.split(",")[1] for line in lines[: len(frame)]]
    assert json.loads(aside.read_text())["line"] == len(frame) + 2
    # Counting decodes in other steps, and a step may be lost.
    assert abs(log_of(cut).counts()[0] - len(frame)) < 500


def test_a_file_that_is_not_compressed(tmp_path):
    for suffix in ("gz", "zst", "GZ"):
        path = write(tmp_path / f"log.csv.{suffix}", [HEADER, GOOD])
        for action in (log_of(path).counts, lambda path=path: read(log_of(path))):
            with pytest.raises(DataError, match=r"log.csv.*damaged or truncated"):
                action()


def test_a_line_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 16)
    monkeypatch.setattr(blocks, "_LONGEST_LINE", 1000)
    path = write(tmp_path / "log.csv", [HEADER, GOOD, "1," + "x" * 5000, GOOD])
    with pytest.raises(DataError, match=r"a line after line 2 is longer than"):
        read(log_of(path), "skip")


def test_a_flipped_bit_in_gzip_is_damage(tmp_path):
    path = compressed(tmp_path / "log.csv.gz", [HEADER, *[GOOD] * 500], 1.0)
    damaged = bytearray(path.read_bytes())
    damaged[-6] ^= 1  # in the checksum
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="damaged or truncated"):
        read(log_of(path))


def test_damaged_parquet(tmp_path):
    path = tmp_path / "log.parquet"
    columns = dict(zip(HEADER.split(","), GOOD.split(","), strict=True))
    pl.DataFrame({name: [value] * 50 for name, value in columns.items()}).write_parquet(path)
    assert len(read(log_of(path))[0]) == 50
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"log.parquet: cannot be read as Parquet"):
        read(log_of(path))


def test_bad_rows_of_parquet(tmp_path):
    path = tmp_path / "log.parquet"
    columns = dict(zip(HEADER.split(","), GOOD.split(","), strict=True))
    frame = pl.DataFrame({name: [value] * 5 for name, value in columns.items()})
    frame = frame.with_columns(pl.Series("x", [1.0, None, float("nan"), 2.0, float("inf")]))
    frame.write_parquet(path)
    with pytest.raises(DataError, match="line 3, column x: found nan"):
        read(log_of(path))
    assert read(log_of(path), "skip")[1].tolist() == [0, 1, 3]


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
        ("user", pl.Enum(["anna", "NA"])),
        ("y", pl.Boolean),
        ("x", pl.Decimal(10, 2)),
        ("w", pl.Int8),
        ("slot", pl.String),
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
        ("user", [{"a": 1}] * 3),
        ("user", [b"a", b"\xff", b"c"]),
        ("t", [1.5, 2.5, 3.5]),
    ],
)
def test_types_of_parquet_columns_that_are_of_no_use(tmp_path, column, values):
    path = tmp_path / "log.parquet"
    pl.DataFrame({**PARQUET, column: values}).write_parquet(path)
    with pytest.raises(DataError, match=rf"log.parquet: column {column} is stored as"):
        read(log_of(path))


# Files


def test_expand(tmp_path):
    for name in ("day_10", "day_2", "day_1"):
        (tmp_path / name).touch()
    assert [path.name for path in expand(str(tmp_path / "day_*"))] == ["day_1", "day_2", "day_10"]
    (tmp_path / "odd[1].csv").touch()
    assert expand(str(tmp_path / "odd[1].csv")) == [tmp_path / "odd[1].csv"]
    with pytest.raises(DataError, match="no such file"):
        expand(str(tmp_path / "nothing*"))
    with pytest.raises(DataError, match="is a folder"):
        expand(str(tmp_path))
    with pytest.raises(DataError, match="stands twice"):
        expand([str(tmp_path / "day_1"), str(tmp_path / "day_1*")])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "bc", "", "\r", "x" * 40]), max_size=12),
    st.booleans(),
    st.integers(1, 50),
)
def test_blocks_hold_every_line_once(tmp_path_factory, lines, ended, size):
    path = tmp_path_factory.mktemp("blocks") / "log.csv"
    text = "\n".join(lines).encode() + b"\n" * ended
    path.write_bytes(text)
    expected = text.rstrip(b"\r\n").split(b"\n") if text.rstrip(b"\r\n") else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", size)
        found, first = [], 1
        for block in read_blocks(path, BadRows("error")):
            assert block.first_line == first and block.data.endswith(b"\n")
            rows = block.data[:-1].split(b"\n")
            assert len(rows) == block.lines
            first += block.lines
            found += rows
    assert [row.rstrip(b"\r") for row in found] == [row.rstrip(b"\r") for row in expected]
    assert count_lines(path) == len(expected)
