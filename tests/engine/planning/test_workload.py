"""How lookups spread over the rows of a table."""

import numpy as np
import pytest
import torch

from stampede.data import SyntheticClicks
from stampede.engine.planning.workload import sampled, sampled_rows, zipf


def test_without_skew():
    assert [zipf(8, 0.0)(row) for row in (0, 2, 8)] == [0.0, 0.25, 1.0]


def test_zipf_is_that_of_synthetic_clicks():
    clicks = SyntheticClicks(scale=0.0001, zipf=1.3)
    dataset = clicks.dataset(20_000, 100)
    size = dataset.vocabulary_sizes["C3"]
    ids = dataset.train.read(torch.arange(20_000)).ids[:, 2].numpy()
    for row in (1, 10, 100, size):
        assert zipf(size, 1.3)(row) == pytest.approx((ids < row).mean(), abs=0.015)
    assert zipf(size, 1.3)(0) == 0.0


def test_a_sample_is_counted():
    known = sampled(np.array([0, 0, 1, 5]))
    assert [known(row) for row in (0, 1, 5, 6)] == [0.0, 0.5, 0.75, 1.0]


def test_a_sample_of_rows_is_spread_over_the_part():
    assert np.array_equal(sampled_rows(300), np.arange(300))
    rows = sampled_rows(10**9)
    assert len(set(rows.tolist())) == len(rows) == 64 * 1024
    assert rows[0] == 0 and rows[-1] == 10**9 - 1
