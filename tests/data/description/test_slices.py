"""Slices of time or rows: few, and together all rows."""

import numpy as np
import pandas as pd
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.data.description.slices import SLICES, TIME_WIDTHS, SliceCounter


@given(
    places=st.lists(st.integers(-(10**6), 10**10), min_size=1, max_size=200),
    chunks=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_slices_hold_all_rows_and_are_no_wider_than_needed(places, chunks):
    counter = SliceCounter(TIME_WIDTHS)
    label = np.arange(len(places)) % 2
    for chunk in np.array_split(np.arange(len(places)), chunks):
        counter.add(pl.Series(np.array(places)[chunk]), pl.Series(label[chunk]))
    found = counter.slices(by_time=True)
    starts = np.array(places) // found.width * found.width
    expected = pd.DataFrame({"label": label}).groupby(starts)["label"].agg(["size", "sum"])
    assert found.table["start"].to_list() == expected.index.tolist()
    assert found.table["rows"].to_list() == expected["size"].tolist()
    assert found.table["positives"].to_list() == expected["sum"].tolist()

    def spanned(width):
        return max(places) // width - min(places) // width + 1

    assert spanned(found.width) <= SLICES or found.width == TIME_WIDTHS[-1]
    level = TIME_WIDTHS.index(found.width)
    assert level == 0 or spanned(TIME_WIDTHS[level - 1]) > SLICES


def test_slices_of_many_times_stay_few():
    counter = SliceCounter(TIME_WIDTHS)
    draw = np.random.default_rng(0)
    times = draw.integers(0, 30 * 86400, (5, 20_000))
    for chunk in times:
        counter.add(pl.Series(chunk), pl.Series(np.ones(20_000)))
    found = counter.slices(by_time=True)
    assert found.width == 86400
    np.testing.assert_array_equal(found.table["rows"], np.bincount(times.ravel() // 86400))
