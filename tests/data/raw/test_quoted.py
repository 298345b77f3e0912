"""Quoted cells with line ends, against csv of Python and pandas; quotes in wrong places."""

import csv
import io

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stampede.data import DataError
from stampede.data.raw import files as blocks
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema

META = Schema.model_validate({"label": "y", "ids": ["user"], "numbers": ["x"], "missing": ["NA"]})


def read(path, policy="error"):
    log, bad = RawLog(META, [path]), BadRows(policy)
    chunks = list(log.chunks(bad))
    users = [user for chunk in chunks for user in chunk.frame["user"].to_list()]
    numbers = np.concatenate([chunk.numbers for chunk in chunks]).tolist()
    assert sum(log.counts()) == len(users) + bad.count
    return users, numbers, bad.count


CELLS = st.text('a,"\n\r 0', max_size=6)


@pytest.mark.slow
@settings(max_examples=30)
@given(users=st.lists(CELLS, min_size=1, max_size=12), end=st.sampled_from(["\n", "\r\n"]))
@pytest.mark.parametrize("size", [7, 40, 1 << 20])
def test_any_cells(tmp_path_factory, users, end, size):
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([["y", "user", "x"], *([i % 2, user, i] for i, user in enumerate(users))])
    path = tmp_path_factory.mktemp("log") / "log.csv"
    path.write_bytes(text.getvalue().encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", size)
        found, numbers, _ = read(path)
    assert found == users and numbers == list(range(len(users)))
    by_pandas = pd.read_csv(path, dtype=str, keep_default_na=False)
    assert by_pandas["user"].tolist() == users


@pytest.mark.parametrize("size", [30, 1 << 20])
@pytest.mark.parametrize(
    "bad, found",
    [
        ('0,"abc"d,3', "text after the closing quote of a cell"),
        ('0,""a"",3', "text after the closing quote of a cell"),
        ('0,"a"b"c",3', "text after the closing quote of a cell"),
        ('0,"abc" ,3', "text after the closing quote of a cell"),
        ('0,"abc,3', "a quote that is not closed"),
        ('0,ab"c,3', "a quote that is not closed"),
        ('0,"a,3', "a quote that is not closed"),
        ('0,"two\nlines",3,4', "4 columns"),
    ],
)
def test_a_quote_in_the_wrong_place_is_the_fault_of_its_row(
    tmp_path, monkeypatch, bad, found, size
):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", size)
    good = ['1,"two\nlines",2', "1,anna,2", '1,"a ""b"" c",2']
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["y,user,x", good[0], good[1], bad, *good, good[0]]) + "\n")
    lines = bad.count("\n") + 1
    if lines == 1:
        with pytest.raises(DataError, match=rf"line 5: found {found}"):
            read(path)
    else:
        # Not one row, so each of its lines is a bad one.
        with pytest.raises(DataError, match="line 5: found "):
            read(path)
    users, numbers, count = read(path, "skip")
    assert users == ["two\nlines", "anna", "two\nlines", "anna", 'a "b" c', "two\nlines"]
    assert count == lines
    assert numbers == [0, 1, *range(2 + lines, 6 + lines)]


def cells_of(line):
    """What csv of Python makes of a line; None if it is not one row of CSV."""
    try:
        rows = list(csv.reader(io.StringIO(line, newline=""), strict=True))
    except csv.Error:
        return None
    return rows[0] if len(rows) == 1 and len(rows[0]) == 3 else None


# An odd number of quotes may open a cell that goes on in the next line.
EVEN = st.text('a," ', max_size=8).filter(lambda cell: cell.count('"') % 2 == 0)


@pytest.mark.wide
@settings(max_examples=100)
@given(cells=st.lists(EVEN, min_size=1, max_size=6))
@example(cells=['""a""'])
@example(cells=['ab"c"d', 'a""', '"a""b"', 'x"y",z'])
def test_quotes_anywhere(tmp_path_factory, cells):
    """Each line is read as csv of Python reads it, or is a bad row."""
    lines = [f"1,{cell},{i}" for i, cell in enumerate(cells)]
    expected = [cells_of(line) for line in lines]
    path = tmp_path_factory.mktemp("log") / "log.csv"
    path.write_text("\n".join(["y,user,x", *lines, "1,last,9"]) + "\n")
    users, numbers, bad = read(path, "skip")
    good = [i for i, cells in enumerate(expected) if cells is not None]
    assert users == [*(expected[i][1] for i in good), "last"]
    assert numbers == [*good, len(lines)] and bad == len(lines) - len(good)
    # Pandas reads on after a closing quote; what it has to agree on are good rows.
    by_pandas = pd.read_csv(path, dtype=str, keep_default_na=False, nrows=1) if 0 in good else None
    assert by_pandas is None or by_pandas["user"][0] == users[0]


def test_lines_are_counted_within_cells(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text('y,user,x\n1,"a\n\n\nb",2\n1,c,2\n7,"d\ne",2\n')
    with pytest.raises(DataError, match="line 7, column y: found 7"):
        read(path)
    assert read(path, "skip")[:2] == (["a\n\n\nb", "c"], [0, 1])


def test_a_quote_that_is_never_closed_costs_one_row(tmp_path):
    path, rows = tmp_path / "log.csv", 20_000
    lines = [f"1,user number {i},2" for i in range(rows)]
    lines[10] = '1,"user,2'
    path.write_text("\n".join(["y,user,x", *lines]) + "\n")
    users, numbers, count = read(path, "skip")
    assert (len(users), count) == (rows - 1, 1) and 10 not in numbers
