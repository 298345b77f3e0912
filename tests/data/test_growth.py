"""Vocabularies that grow, against an oracle of dictionaries."""

from collections import Counter

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stampede.data.learning.vocabulary import grown, nothing_known
from stampede.data.options import GrowthOptions


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
