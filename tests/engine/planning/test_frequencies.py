"""How lookups spread over the rows of a table."""

import numpy as np
import pytest
import torch

from stampede.data import SyntheticClicks
from stampede.engine.planning.frequencies import Sampled, Uniform, Zipf


def test_uniform():
    assert [Uniform(8).below(row) for row in (0, 2, 8)] == [0.0, 0.25, 1.0]


def test_zipf_is_that_of_synthetic_clicks():
    clicks = SyntheticClicks(scale=0.0001, zipf=1.3)
    dataset = clicks.dataset(20_000, 100)
    size = dataset.vocabulary_sizes["C3"]
    ids = dataset.train.read(torch.arange(20_000)).ids[:, 2].numpy()
    for row in (1, 10, 100, size):
        assert Zipf(size, 1.3).below(row) == pytest.approx((ids < row).mean(), abs=0.015)
    assert Zipf(size, 1.3).below(0) == 0.0


def test_a_sample_is_counted():
    known = Sampled(np.array([0, 0, 1, 5]))
    assert [known.below(row) for row in (0, 1, 5, 6)] == [0.0, 0.5, 0.75, 1.0]
