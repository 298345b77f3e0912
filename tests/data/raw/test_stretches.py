"""Stretches of a file, read one by one, are the file: its rows in the same pieces."""

from itertools import product

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from stampede.data.errors import DataError
from stampede.data.raw import files, formats
from stampede.data.raw.files import block_starts
from stampede.data.raw.formats import WHOLE
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema

SCHEMA = Schema.model_validate(
    {"label": "click", "numbers": {"age": {}}, "ids": {"user": {}}, "missing": [""]}
)


def pieces(log, only=None, policy="error"):
    """Numbers and rows of each chunk."""
    return [(chunk.numbers, chunk.frame) for chunk in log.chunks(BadRows(policy), only)]


def stretches(log, most):
    """The stretches with the rows before each, as Spark's tasks get them; None if not divisible."""
    found, rows = [], 0
    for one in log.stretches(0, most):
        counted, is_separate = log.survey(0, one)
        if not is_separate:
            return None
        found.append(one._replace(rows=rows))
        rows += counted
    assert rows == log.count(0)
    return found


def assert_whole(log, most, policy="error"):
    """The stretches together are the log, in the same pieces; their number."""
    divided = stretches(log, most)
    found = [one for stretch in divided for one in pieces(log, (0, stretch), policy)]
    expected = pieces(log, policy=policy)
    assert len(found) == len(expected)
    for (numbers, frame), (wanted, other) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(numbers, wanted)
        assert_frame_equal(frame, other)
    return len(divided)


def lines_of(draw, rows):
    return [
        f"{draw.integers(2)},{draw.integers(99)},{'u' * draw.integers(1, 9)}" for _ in range(rows)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_random_texts(tmp_path, monkeypatch, seed):
    draw = np.random.default_rng(seed)
    monkeypatch.setattr(files, "BLOCK_BYTES", int(draw.integers(40, 300)))
    end = "\r\n" if seed % 3 == 0 else "\n"
    lines = lines_of(draw, int(draw.integers(1, 200)))
    has_header = bool(draw.integers(2))
    text = end.join(["click,age,user"] * has_header + lines) + end * int(draw.integers(4))
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xef\xbb\xbf" * int(draw.integers(2)) + text.encode())
    columns = [] if has_header else ["click", "age", "user"]
    log = RawLog(SCHEMA.model_copy(update={"columns": columns}), [path])
    if sum(map(len, lines)) > 2000:
        assert assert_whole(log, 1) > 3
    assert_whole(log, int(draw.integers(1, 5)))


def test_bad_rows_have_the_numbers_of_their_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    path = tmp_path / "log.csv"
    lines = lines_of(np.random.default_rng(0), 100)
    lines[70] = "1,x,user"
    path.write_text("\n".join(["click,age,user", *lines]))
    log = RawLog(SCHEMA, [path])
    with pytest.raises(DataError, match="line 72, column age"):
        for one in stretches(log, 1):
            pieces(log, (0, one))
    assert assert_whole(log, 2, "skip") > 4


@pytest.mark.parametrize("change", ["empty lines", "quotes", "compressed"])
def test_what_cannot_be_divided_is_read_as_a_whole(tmp_path, monkeypatch, change):
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    lines = lines_of(np.random.default_rng(0), 100)
    lines[60] = '1,3,"u\nv"' if change == "quotes" else lines[60]
    path = tmp_path / ("log.csv.gz" if change == "compressed" else "log.csv")
    end = "\n\n\n" if change == "empty lines" else "\n"
    path.write_text(end.join(["click,age,user", *lines]))
    log = RawLog(SCHEMA, [path])
    if change == "quotes":
        assert len(log.stretches(0, 1)) > 4 and stretches(log, 1) is None
    else:
        assert log.stretches(0, 1) == [WHOLE]
    assert block_starts(path)[0] == 0


@pytest.mark.parametrize("group, most", product([40, 50, 100, 130], [1, 2]))
def test_row_groups(tmp_path, monkeypatch, group, most):
    monkeypatch.setattr(formats, "_BATCH_ROWS", 50)
    draw = np.random.default_rng(0)
    frame = pl.DataFrame({"click": draw.integers(0, 2, 777), "age": draw.random(777),
                          "user": draw.integers(0, 9, 777)})  # fmt: skip
    frame.write_parquet(tmp_path / "log.parquet", row_group_size=group)
    found = assert_whole(RawLog(SCHEMA, [tmp_path / "log.parquet"]), most)
    # Only groups that begin with a batch can be read by themselves.
    assert found == {(40, 1): 4, (40, 2): 4, (50, 1): 16, (50, 2): 8, (100, 1): 8, (100, 2): 8,
                     (130, 1): 2, (130, 2): 2}[group, most]  # fmt: skip
