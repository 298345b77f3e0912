"""Rows kept between the two passes."""

import numpy as np
import polars as pl
import pytest

from stampede.data.learning.vocabulary import distinct_ids, hashes
from stampede.data.prepare import Spool
from stampede.data.prepared.writer import RowsOfParts
from stampede.data.schema.schema import Schema

SCHEMA = Schema.model_validate(
    {
        "label": "y",
        "numbers": ["whole", "fine"],
        "ids": {"a": {}, "many": {"separator": "|"}, "cut": {"encode": "quantiles", "buckets": 2}},
    }
)
FRAME = pl.DataFrame(
    {
        "#label": pl.Series([0, 1, 1], dtype=pl.Float32),
        "whole": [1.0, None, -(2.0**30)],
        "fine": [0.1, None, 1e300],
        "a": ["u", None, "u"],
        "many": [["p", "q"], [], None],
        "cut": [None, 0.5, 0.25],
    }
)


def spool_with_frame(folder):
    spool = Spool(folder, SCHEMA)
    distinct = distinct_ids(FRAME, SCHEMA)
    rows = RowsOfParts(FRAME.drop(distinct), np.array([0, 2, 1], np.int8), 77, distinct)
    spool.append(rows)
    spool.append(rows._replace(position=99))
    return spool


def test_rows_come_back_as_they_were(tmp_path):
    spool = spool_with_frame(tmp_path / "spool")
    found = list(spool)
    assert [rows.position for rows in found] == [77, 99]
    for rows in found:
        assert rows.frame.drop("many").equals(FRAME.drop("a", "many"))
        assert rows.frame.schema["fine"] == rows.frame.schema["whole"] == pl.Float64
        assert [None if ids is None else len(ids) for ids in rows.frame["many"]] == [2, 0, None]
        assert rows.parts.tolist() == [0, 2, 1]
        column = rows.distinct["a"]
        assert column.values[column.codes].equals(hashes(FRAME["a"]))
    assert not any((tmp_path / "spool").iterdir())


def test_repetitions_and_empty_bits_are_not_kept(tmp_path):
    spool_with_frame(tmp_path / "spool")
    kept = pl.read_ipc(tmp_path / "spool" / "0.arrow").schema
    assert kept["a"] == pl.UInt8
    assert kept["whole"] == kept["cut"] == pl.Float32
    assert kept["fine"] == pl.Float64


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(tmp_path, rows):
    spool = Spool(tmp_path / "spool", SCHEMA)
    frame = FRAME.head(rows)
    distinct = distinct_ids(frame, SCHEMA)
    spool.append(RowsOfParts(frame.drop(distinct), np.zeros(rows, np.int8), 5, distinct))
    assert [len(found.frame) for found in spool] == [1] * rows
