"""Rows of two tables that mean the same are matched; the fingerprint of what was learned."""

import json
import shutil
from bisect import bisect_left

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stampede.data.learning.row_meanings import (
    OtherMeaningError,
    RowMeanings,
    matched_rows,
    vocabulary_fingerprint,
)
from stampede.data.learning.rows_of_ids import FIRST_ROW
from stampede.data.prepared.manifest import FieldEntry
from stampede.data.schema.schema import Hashed, Integers, Quantiles, TimePart, Vocabulary
from support.movie_runs import prepare_movies
from support.movies import MOVIES
from support.prepared import drawn_fields, drawn_rows, write_prepared
from support.preparing import prepared

EDGES = st.lists(st.integers(-5, 5).map(float), unique=True, max_size=8).map(sorted)


def meanings(rows, field=None, missing=None, unseen=None, **more):
    entry = FieldEntry(name="f", rows=rows, missing_row=missing, unseen_row=unseen)
    return RowMeanings(entry, field, **more)


def vocabulary(texts):
    texts = pl.Series(texts, dtype=pl.String)
    return meanings(FIRST_ROW + len(texts), Vocabulary(), 0, 1, values=lambda: texts)


def quantiles(edges):
    field = Quantiles(encode="quantiles", buckets=9)
    return meanings(len(edges) + 2, field, 0, edges=tuple(edges))


def integers(size):
    return meanings(size + 1, Integers(encode="integer", size=size), size)


def hashed(buckets, seed=0):
    return meanings(buckets + 1, Hashed(encode="hash", buckets=buckets, seed=seed), buckets)


def part_of_time(encode):
    return meanings(8, TimePart(encode=encode), 7)


@given(EDGES, EDGES, st.lists(st.floats(-7, 7), max_size=30))
def test_buckets_match_if_they_hold_the_same_numbers(saved, now, numbers):
    found = matched_rows(quantiles(saved), quantiles(now))
    assert found[0] == 0
    for number in [*numbers, *saved, *now]:
        row = bisect_left(now, number) + 1
        then = bisect_left(saved, number) + 1
        bounds = [
            (edges[r - 2] if r > 1 else None, edges[r - 1] if r <= len(edges) else None)
            for edges, r in ((saved, then), (now, row))
        ]
        assert found[row] == (then if bounds[0] == bounds[1] else -1)


# Rows of missing and of unseen values, which differ if there are both.
ROW = st.none() | st.integers(0, 5)
SPECIAL = st.tuples(ROW, ROW).filter(lambda rows: rows[0] is None or rows[0] != rows[1])


@given(st.integers(6, 12), st.integers(6, 12), SPECIAL, SPECIAL)
def test_rows_of_missing_and_unseen_values_match_by_their_kind(saved, now, specials_then, specials):
    then_missing, then_unseen = specials_then
    missing, unseen = specials
    found = matched_rows(
        meanings(saved, None, then_missing, then_unseen), meanings(now, None, missing, unseen)
    )
    for row in range(now):
        if row in (missing, unseen):
            expected = then_missing if row == missing else then_unseen
            expected = -1 if expected is None else expected
        else:
            expected = row if row < saved and row not in (then_missing, then_unseen) else -1
        assert found[row] == expected
    taken = found[found >= 0]
    assert len(np.unique(taken)) == len(taken)


def test_tables_of_other_encodings_are_refused():
    kinds = [vocabulary([]), quantiles([1.0]), integers(7), hashed(7), meanings(8),
             part_of_time("weekday"), part_of_time("hour_of_day")]  # fmt: skip
    for i, one in enumerate(kinds):
        for j, other in enumerate(kinds):
            if i == j:
                assert (matched_rows(one, other) >= 0).all()
                continue
            with pytest.raises(OtherMeaningError, match=f"was {one.encode}, now {other.encode}"):
                matched_rows(one, other)
    for other in (hashed(6, 3), hashed(5, 4)):
        with pytest.raises(OtherMeaningError, match=r"5 buckets with seed 3, now [56] .* [34]$"):
            matched_rows(hashed(5, 3), other)


def prepare(folder, name="out", schema=MOVIES, **options):
    (folder / "schema.yaml").write_text(schema)
    return prepared(folder / name, "table", str(folder / "log.csv"),
                    schema=str(folder / "schema.yaml"), **options)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return prepare_movies(tmp_path)


def test_it_does_not_depend_on_the_place_or_form_of_the_files(folder, tmp_path):
    first = prepare(folder)
    found = vocabulary_fingerprint(first)
    assert len(found) == 64
    shutil.copytree(first, tmp_path / "elsewhere/copy")
    assert vocabulary_fingerprint(tmp_path / "elsewhere/copy") == found
    # Other files with the same content, and counts on disk.
    again = prepare(folder, "again", shard_rows=50, counts_gb=1e-9, spool=False)
    for path in (again / "learned").glob("*.parquet"):
        frame = pl.read_parquet(path).with_columns(count=pl.lit(1))
        frame.write_parquet(path, compression="uncompressed")
    assert vocabulary_fingerprint(again) == found


def test_ids_rules_and_statistics_change_it(folder):
    data = prepare(folder)
    found = [vocabulary_fingerprint(data)]
    # Checkpoints hold fingerprints that earlier versions of stampede computed.
    assert found == ["0eccb9d868eb4bca0cd7be3a4ec269db81172837992ba5614d7e8fcb92068864"]
    for change in (
        ("buckets: 7, seed: 3", "buckets: 7, seed: 4"),
        ("fill: 30", "fill: 31"),
        ("[log1p, standard]", "[log1p]"),
        ("max_ids: 2", "max_ids: 3"),
    ):
        assert MOVIES.count(change[0]) == 1
        other = prepare(folder, f"other_{len(found)}", MOVIES.replace(*change))
        found.append(vocabulary_fingerprint(other))
    path = data / "learned/movie.parquet"
    frame = pl.read_parquet(path)
    rest = [f"x{i}" for i in range(len(frame) - 2)]
    for texts in (("a", "bc"), ("ab", "c"), ("c", "ab"), ("abc", "")):
        frame.with_columns(value=pl.Series([*texts, *rest])).write_parquet(path)
        found.append(vocabulary_fingerprint(data))
    path = data / "learned/learned.json"
    values = json.loads(path.read_text())
    for factor in (1 + 1e-12, 1.01):
        values["ranges"]["age"]["mean"] *= factor
        path.write_text(json.dumps(values))
        found.append(vocabulary_fingerprint(data))
    # A mean that differs by rounding is the same one.
    assert found[-2] == found[-3] and len(set(found)) == len(found) - 1


def test_it_covers_the_fields_of_imported_arrays(tmp_path):
    parts = {"train": drawn_rows(20), "test": drawn_rows(20)}
    fields = drawn_fields()
    one = vocabulary_fingerprint(write_prepared(tmp_path / "a", parts, fields))
    assert vocabulary_fingerprint(write_prepared(tmp_path / "b", parts, fields)) == one
    # The dense layers see fields in this order.
    other = dict(reversed(fields.items()))
    assert vocabulary_fingerprint(write_prepared(tmp_path / "c", parts, other)) != one
