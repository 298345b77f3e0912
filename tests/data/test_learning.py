"""Counts, vocabularies and their growth, hashes, ranges, quantiles, each against plain Python."""

import math
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stampede.data.formulas import bucket, bucket_rows
from stampede.data.learning import COUNT, VALUE, learned, sorting
from stampede.data.learning.learned import IdsInPieces, NumberRange, transformed
from stampede.data.learning.learner import Learner, edges_of_quantiles, ranges
from stampede.data.learning.rows_of_ids import RowsOfIds
from stampede.data.learning.sorting import write_pieces
from stampede.data.learning.value_counts import ValueCounts, distinct, distinct_ids
from stampede.data.learning.vocabulary import grown, nothing_known, vocabulary
from stampede.data.options import GrowthOptions
from stampede.data.schema.schema import NumberField, Schema, Vocabulary
from support.quantiles import edges_by_hand

TEXT = st.text(max_size=20)
CHUNKS = st.lists(st.lists(st.none() | TEXT, max_size=30), max_size=6)


def counts_of(chunks, folder, budget):
    counts = ValueCounts({"a": "a", "b": "b"}, budget, folder)
    for values in chunks:
        lists = pl.Series("b", [[v, v] for v in values], dtype=pl.List(pl.String))
        counts.add(pl.DataFrame([pl.Series("a", values, dtype=pl.String), lists]), {})
    return counts


@pytest.mark.wide
@settings(max_examples=30, deadline=None)
@given(chunks=CHUNKS, others=CHUNKS, budget=st.sampled_from([1, 400, 10**9]))
def test_columns_counted_together(tmp_path_factory, chunks, others, budget):
    counts = ValueCounts({"a": "t", "b": "t"}, budget, tmp_path_factory.mktemp("counts"))
    expected = Counter()
    for one, other in zip(chunks, others, strict=False):
        rows = max(len(one), len(other))
        one, cells = one + [None] * (rows - len(one)), [other, *[[]] * (rows - 1)][:rows]
        lists = pl.Series("b", cells, dtype=pl.List(pl.String))
        counts.add(pl.DataFrame([pl.Series("a", one, dtype=pl.String), lists]), {})
        expected.update(value for value in (*one, *(other if rows else ())) if value is not None)
    rows = [row for table in counts.tables("t") for row in table.rows()]
    assert sorted(rows) == sorted(expected.items())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    chunks=CHUNKS,
    min_count=st.integers(1, 3),
    max_size=st.none() | st.integers(1, 5),
    budget=st.sampled_from([1, 400, 10**9]),
    at_a_time=st.sampled_from([1, 2, 3, 10**6]),
    is_mapped=st.booleans(),
)
def test_counts_and_vocabularies_with_any_budget(
    tmp_path_factory, chunks, min_count, max_size, budget, at_a_time, is_mapped
):
    folder = tmp_path_factory.mktemp("counts")
    counts = counts_of(chunks, folder, budget)
    expected = Counter(value for values in chunks for value in values if value is not None)
    if budget != 400:
        assert any(folder.rglob("*.parquet")) == (budget == 1 and bool(expected))
    # The lists hold every value twice; each value is in one table.
    rows = [row for table in counts.tables("b") for row in table.rows()]
    assert sorted(rows) == sorted((value, 2 * count) for value, count in expected.items())
    field = Vocabulary(min_count=min_count, max_size=max_size)
    file = tmp_path_factory.mktemp("learned") / "a.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "_MOST_IN_MEMORY", at_a_time)
        patch.setattr(sorting, "_ROWS_OF_A_PIECE", at_a_time)
        write_pieces(file, vocabulary(counts.tables("a"), field, folder / "sorted"))
    found = pl.read_parquet(file)
    assert not any(folder.rglob("*.parquet"))
    kept = [(value, count) for value, count in expected.items() if count >= min_count]
    kept.sort(key=lambda pair: (-pair[1], pair[0].encode()))
    assert found.rows() == kept[:max_size]
    rows = RowsOfIds(IdsInPieces(file, at_a_time), folder / "index" if is_mapped else None)
    if is_mapped:
        # What another process reads, which need not see the ids.
        rows = RowsOfIds([], folder / "index")
    assert rows.size == len(found)
    asked = pl.Series([None, "never seen before", *(v for values in chunks for v in values)])
    place = {value: row + 2 for row, (value, _) in enumerate(kept[:max_size])}
    expected_rows = [0 if value is None else place.get(value, 1) for value in asked]
    assert rows(asked.cast(pl.String)).tolist() == expected_rows


def test_both_zeros_are_one_value(tmp_path):
    counts = ValueCounts({"price": "price"}, 10**6, tmp_path)
    for values in ([-0.0, 1.0], [0.0, -0.0]):
        counts.add(pl.DataFrame({"price": values}), {})
    (table,) = counts.tables("price")
    found = {str(row[VALUE]): row[COUNT] for row in table.iter_rows(named=True)}
    assert found == {"0.0": 3, "1.0": 1}


def test_ids_with_one_hash_get_another_seed(monkeypatch):
    honest = pl.Series.hash
    seeds = []

    def colliding(series, seed=0):
        seeds.append(seed)
        return honest(series, seed) if seed >= 2 else pl.Series([7] * len(series), dtype=pl.UInt64)

    monkeypatch.setattr(pl.Series, "hash", colliding)
    rows = RowsOfIds([pl.Series(["a", "b", "c"])])
    assert rows(pl.Series(["c", "x", "a"])).tolist() == [4, 1, 2]
    assert list(dict.fromkeys(seeds)) == [0, 1, 2]


def fnv_by_hand(text, seed):
    def mixed(h):
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB % 2**64
        return h ^ (h >> 31)

    h = mixed(seed) ^ 0xCBF29CE484222325
    for byte in text.encode():
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return mixed(h)


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXT, max_size=30), st.integers(1, 10**12), st.integers(0, 2**63 - 1))
def test_hash_against_plain_python(texts, buckets, seed):
    found = bucket(pl.Series(texts, dtype=pl.String), buckets, seed)
    assert found.tolist() == [fnv_by_hand(text, seed) % buckets for text in texts]


def test_the_hash_never_changes():
    """Trained tables depend on it."""
    found = bucket(pl.Series(["a", "68fd1e64"]), 2**62, 0)
    assert found.tolist() == [198367012849983736, 1469794369386453849]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=20), min_size=1, max_size=5
    ),
    st.sampled_from([[], ["log1p"], ["minmax"], ["standard"], ["log1p", "standard"]]),
    st.floats(-5, 5),
)
# Equal values: their variance is not quite 0, but they must not be scaled up.
@example([[None] * 6], ["log1p", "standard"], 2.0)
def test_ranges_of_chunks_are_those_of_the_whole(chunks, transform, fill):
    field = NumberField(transform=transform, fill=fill)
    seen = NumberRange()
    for values in chunks:
        frame = pl.DataFrame([pl.Series("x", values, dtype=pl.Float64)])
        seen = seen.merged(ranges(frame, {"x": field})["x"])
    flat = [fill if v is None else v for values in chunks for v in values]
    array = np.log1p(np.maximum(flat, 0)) if "log1p" in transform else np.array(flat)
    scale = max(1.0, np.abs(array).max())
    assert seen.rows == len(array)
    assert (seen.low, seen.high) == pytest.approx((array.min(), array.max()))
    assert seen.mean == pytest.approx(array.mean(), abs=1e-9 * scale)
    assert seen.squares == pytest.approx(array.var() * len(array), abs=1e-6 * scale**2)
    frame = pl.DataFrame([pl.Series("x", [*flat, None, 1e7], dtype=pl.Float64)])
    found = frame.select(transformed("x", field, seen))["x"].to_numpy()
    array = np.array([*flat, fill, 1e7])
    array = np.log1p(np.maximum(array, 0)) if "log1p" in transform else array
    if transform == ["minmax"]:
        array = np.clip((array - seen.low) / ((seen.high - seen.low) or 1), 0, 1)
    if "standard" in transform:
        differ = seen.high > seen.low
        # The squares of tiny distances are 0.
        spread = math.sqrt(seen.squares / seen.rows) if differ else 0
        array = (array - seen.mean) / (spread or 1)
    np.testing.assert_allclose(found, array.astype(np.float32), rtol=1e-5, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-20, 20), max_size=60),
    st.lists(st.integers(-20, 20), max_size=3),
    st.integers(2, 12),
    st.sampled_from([1, 2, 5, 10**6]),
)
def test_edges_of_quantiles_against_python(values, frequent, buckets, at_a_time):
    values = values + 25 * frequent
    counted = Counter(float(value) for value in values)
    half = list(counted.items())
    tables = [
        pl.DataFrame(part, schema={"value": pl.Float64, "count": pl.Int64}, orient="row")
        for part in (half[::2], half[1::2])
    ]
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(sorting, "_MOST_IN_MEMORY", at_a_time)
        patch.setattr(sorting, "_ROWS_OF_A_PIECE", at_a_time)
        edges = edges_of_quantiles(tables, buckets, Path(folder) / "sorted")
        assert not any(Path(folder).iterdir())
    assert len(edges) < buckets
    assert edges == edges_by_hand(list(map(float, values)), buckets)
    rows = bucket_rows(pl.Series([None, *map(float, values)], dtype=pl.Float64), edges)
    assert rows[0] == 0
    assert rows[1:].tolist() == [1 + sum(edge < value for edge in edges) for value in values]


def test_learned_is_read_back(tmp_path):
    schema = Schema.model_validate(
        {
            "label": "y",
            "ids": {"a": {}, "g": {"separator": "|"}},
            "numbers": {"x": {"transform": "minmax"}},
        }
    )
    learner = Learner(schema, 10**9, tmp_path / "spill")
    frame = pl.DataFrame({"a": ["u", "v", "u"], "g": [["p", "q"], [], None], "x": [1.0, 3.0, None]})
    learner.add(frame, {})
    for one in (learner.save(tmp_path / "learned"), learned.load(tmp_path / "learned")):
        distinct = distinct_ids(frame, one.schema)
        assert list(distinct) == ["a"]
        for rows, known in ((frame, None), (frame.drop("a"), distinct)):
            found, [(lengths, values, _)] = one.encode(rows, "float32", known)
            assert found["ids"].tolist() == [[2], [3], [2]]
            assert (lengths.tolist(), values.tolist()) == ([2, 1, 1], [2, 3, 0, 0])
            np.testing.assert_allclose(found["numbers"], [[1 / 3], [1.0], [0.0]], rtol=1e-6)


@settings(max_examples=100, deadline=None)
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
def test_distinct_values_and_the_code_of_each_row(texts):
    column = pl.Series("a", texts, dtype=pl.String)
    for rows, expected in ((column, texts), (column[1:], texts[1:])):
        found = distinct(rows)
        values = found.values.to_list()
        assert found.values.dtype == pl.String
        # Narrow codes take a quarter of the spool on disk.
        assert found.codes.dtype == np.uint8
        assert len(values) == len(set(values))
        assert set(values) == set(expected)
        assert [values[code] for code in found.codes] == expected


class Oracle:
    """Ids with a row and ids without, one at a time."""

    def __init__(self, window, most, evict, min_count):
        self.window, self.most, self.evict, self.min_count = window, most, evict, min_count
        # By row: id, count, first and newest period.
        self.rows = []
        self.waiting = {}

    def take(self, period, counts):
        rows = {row[0]: row for row in self.rows}
        for text, count in counts.items():
            if text in rows:
                rows[text][1] += count
                rows[text][3] = period
            else:
                self.waiting.setdefault(text, {})[period] = count
        for text, periods in list(self.waiting.items()):
            recent = {p: count for p, count in periods.items() if p > period - self.window}
            self.waiting[text] = recent
            if not recent:
                del self.waiting[text]
        totals = {text: sum(periods.values()) for text, periods in self.waiting.items()}
        ready = [text for text, count in totals.items() if count >= self.min_count]
        # Rows that others give up are taken first.
        lacking = 0 if self.most is None else len(self.rows) + len(ready) - self.most
        for text in sorted(ready, key=lambda text: (-totals[text], text)):
            row = [text, totals[text], period, max(self.waiting[text])]
            place = self._free(period) if lacking > 0 else None
            if place is not None:
                self.rows[place] = row
                lacking -= 1
            elif self.most is None or len(self.rows) < self.most:
                self.rows.append(row)
            else:
                continue
            del self.waiting[text]

    def _free(self, period):
        """The row to give up: among those that the period lacks."""

        absent = [p for p, row in enumerate(self.rows) if max(row[2:]) < period]
        # The last text of equals goes first.
        absent.sort(key=lambda place: self.rows[place][0], reverse=True)
        order = (3, 1) if self.evict == "lru" else (1, 3)
        return min(absent, key=lambda p: [self.rows[p][i] for i in order], default=None)


IDS = st.sampled_from([f"id{number}" for number in range(12)])
PERIODS = st.lists(st.lists(IDS, max_size=25), min_size=1, max_size=30)


@settings(max_examples=40)
@given(
    periods=PERIODS,
    window=st.integers(1, 4),
    most=st.one_of(st.none(), st.integers(1, 8)),
    evict=st.sampled_from(["lru", "lfu"]),
    min_count=st.integers(1, 3),
)
@example(periods=[["id2"], ["id0", "id1"]], window=1, most=2, evict="lru", min_count=1)
# Among equals, the largest text loses its row.
@example(periods=[["id0", "id1"], ["id2"]], window=1, most=2, evict="lru", min_count=1)
def test_growth_is_that_of_dictionaries(periods, window, most, evict, min_count):
    options = GrowthOptions(admission_periods=window, max_rows=most, evict=evict)
    oracle, state = Oracle(window, most, evict, min_count), nothing_known()
    for number, ids in enumerate(periods, 1):
        counts = Counter(ids)
        oracle.take(number, counts)
        # Counts on disk come in several tables.
        pairs = list(counts.items())
        tables = [
            pl.DataFrame(part, schema={"value": pl.String, "count": pl.UInt32}, orient="row")
            for part in (pairs[::2], pairs[1::2])
        ]
        state = grown(state, tables, number, min_count, options)
        assert [list(row) for row in state.vocabulary.rows()] == oracle.rows
        waiting = {}
        for text, period, count in state.waiting.rows():
            waiting.setdefault(text, {})[period] = count
        assert waiting == oracle.waiting


@pytest.mark.parametrize("max_rows", [None, 5])
def test_the_smaller_of_both_limits_counts(max_rows):
    counts = pl.DataFrame({"value": list("abcdef"), "count": [6, 5, 4, 3, 2, 1]})
    options = GrowthOptions(max_rows=max_rows)
    found = grown(nothing_known(), [counts], 1, 1, options, max_size=3)
    assert found.vocabulary["value"].to_list() == ["a", "b", "c"]
    assert found.waiting["value"].to_list() == ["d", "e", "f"]


@pytest.mark.parametrize("few, kept", [(5, ["b", "a", "c", "d", "e"]), (4, ["b", "a"])])
def test_rare_ids_are_kept_if_all_together_are_few(tmp_path, few, kept):
    counts = [{"a": 3, "c": 2}, {"b": 4}, {"d": 1, "e": 1}]
    tables = [pl.DataFrame({"value": [*one], "count": [*one.values()]}) for one in counts]
    found = pl.concat(vocabulary(tables, Vocabulary(min_count=3), tmp_path, few))
    assert found["value"].to_list() == kept
