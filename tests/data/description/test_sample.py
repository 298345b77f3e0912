"""A sample of rows whose number is not known."""

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.data.description.sample import RowSample


@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=8), most=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_a_sample_is_a_part_of_the_rows(sizes, most):
    sample = RowSample(most)
    done = 0
    for size in sizes:
        sample.add(pl.DataFrame({"row": np.arange(done, done + size)}))
        done += size
    rows = sample.frame()["row"].to_list()
    assert rows == sorted(set(rows)) and set(rows) <= set(range(done))
    assert len(rows) <= most
    assert sample.whole == (done <= most)
    assert not sample.whole or len(rows) == done


def test_a_sample_is_fair():
    kept = []
    for seed in range(30):
        sample = RowSample(1000, seed)
        for start in range(0, 20_000, 500):
            sample.add(pl.DataFrame({"row": np.arange(start, start + 500)}))
        kept.append(np.histogram(sample.frame()["row"], 10, (0, 20_000))[0])
    tenths = np.sum(kept, axis=0) / np.sum(kept)
    assert np.abs(tenths - 0.1).max() < 0.01
