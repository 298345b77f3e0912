"""Columns without their repetitions, against plain Python."""

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stampede.data.learning.learned import Learner
from stampede.data.learning.vocabulary import ValueCounts, _of_short_texts, distinct, distinct_ids
from stampede.data.schema.schema import Schema


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.none() | st.text(max_size=14), max_size=40)
    | st.integers(0, 13).flatmap(
        lambda n: st.lists(st.none() | st.text("ab\0é", min_size=n, max_size=n), max_size=40)
    )
)
@example(["\0", None, "\0"])
@example(["\0a", "\0b", None])
@example(["a", "a\0", None])
@example(["", None, ""])
def test_values_once_and_the_place_of_each_row(texts):
    column = pl.Series("a", texts, dtype=pl.String)
    for rows, expected in ((column, texts), (column[1:], texts[1:])):
        found = distinct(rows)
        values = found.values.to_list()
        assert found.values.dtype == pl.String
        assert len(values) == len(set(values))
        assert set(values) == set(expected)
        assert [values[code] for code in found.codes] == expected
        assert dict(zip(values, found.counts().tolist(), strict=True)) == {
            value: expected.count(value) for value in expected
        }


@pytest.mark.parametrize("texts", [["68fd1e64", None, "80e26c9b"], ["a", "b"]])
def test_ids_of_public_logs_are_compared_as_numbers(texts):
    assert _of_short_texts(pl.Series(texts)) is not None


@pytest.mark.parametrize("count, bits", [(200, 8), (300, 16), (70_000, 32)])
def test_codes_are_narrow(count, bits):
    codes = distinct(pl.Series([str(i) for i in range(count)])).codes
    assert codes.dtype == f"uint{bits}"
    assert codes.max() == count - 1


def test_counts_of_distinct_columns_are_those_of_their_rows(tmp_path):
    texts = pl.Series("a", ["x", None, "y", "x", "z"])
    column = distinct(texts).take((texts != "z").fill_null(True).to_numpy())
    counts = ValueCounts(["a"], 10**9, tmp_path)
    counts.add(pl.DataFrame(), {"a": column})
    counts.add(pl.DataFrame(), {"a": column})
    (table,) = counts.tables("a")
    assert dict(table.rows()) == {"x": 4, "y": 2}


def test_fields_with_one_id_of_a_vocabulary(tmp_path):
    ids = {"a": {}, "many": {"separator": "|"}, "hash": {"encode": "hash", "buckets": 3}}
    schema = Schema.model_validate({"label": "y", "ids": ids})
    frame = pl.DataFrame({"a": ["u", "v", "u"], "many": [["p"], [], None], "hash": ["1", "2", "3"]})
    assert list(distinct_ids(frame, schema)) == ["a"]
    learned = []
    for rows, columns in ((frame, None), (frame.drop("a"), distinct_ids(frame, schema))):
        learner = Learner(schema, 10**9, tmp_path / "spill")
        learner.add(rows, columns)
        folder = tmp_path / str(len(learned))
        learned.append(learner.save(folder).encode(frame, "float32").ids.tolist())
    assert learned[0] == learned[1]
