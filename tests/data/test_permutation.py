"""The computed permutation: a bijection of any size, and random enough."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from stampede.data.order import Permutation


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 2000), st.lists(st.integers(0, 2**63), min_size=1, max_size=3))
def test_every_number_comes_once(size, key):
    permuted = Permutation(size, key)(np.arange(size))
    assert sorted(permuted.tolist()) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**62), st.integers(0, 100), st.data())
def test_torch_and_numpy_agree_at_any_size_and_no_two_positions_meet(size, key, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
    permutation = Permutation(size, (key,))
    given_array = np.array(positions)
    permuted = permutation(given_array)
    assert given_array.tolist() == positions
    assert len(set(permuted.tolist())) == len(positions)
    assert permuted.min() >= 0 and permuted.max() < size
    assert permutation(torch.tensor(positions)).tolist() == permuted.tolist()


def test_any_part_of_the_key_matters():
    orders = [
        Permutation(1000, key)(np.arange(1000)).tolist()
        for key in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0))
    ]
    shared = [np.mean(np.equal(a, b)) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(shared) < 0.02


def p_value(counts):
    """Of counts that should all be alike."""
    return stats.chisquare(np.ravel(counts)).pvalue


@pytest.mark.parametrize("size", [2, 3, 5, 8, 10, 16, 30, 64, 100, 128])
def test_small_sets_over_many_keys(size):
    orders = np.stack([Permutation(size, (7, key))(np.arange(size)) for key in range(2000)])
    places = [np.bincount(column, minlength=size) for column in orders.T]
    assert p_value(places) > 1e-4
    if size > 2:
        steps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % size).ravel(), minlength=size)
        assert p_value(steps[1:]) > 1e-4


@pytest.mark.parametrize("size", [1000, 4096, 100_003, 1_000_000, 2**20, 2**20 + 1])
def test_large_sets(size):
    permuted = Permutation(size, (3, 1))(np.arange(size))
    cells = 8 if size < 10_000 else 32
    coarse = permuted * cells // size
    before = np.arange(size) * cells // size

    def pairs(one, other):
        return np.bincount(one * cells + other, minlength=cells**2)

    # Where a row goes, what follows it, and both again in the lowest bits.
    assert p_value(pairs(before, coarse)) > 1e-4
    assert p_value(pairs(coarse[:-1], coarse[1:])) > 1e-4
    low = permuted % cells
    assert stats.chi2_contingency(pairs(low[:-1], low[1:]).reshape(cells, cells)).pvalue > 1e-4
    # A permutation at random leaves one number in its place on average.
    assert (permuted == np.arange(size)).sum() < 10
    assert abs((np.diff(permuted) > 0).mean() - 0.5) < 3 / np.sqrt(size)


def test_a_split_by_the_first_positions_is_a_random_sample():
    """As the random split of rows: those whose number is below a tenth."""
    size = 50_000
    chosen = np.flatnonzero(Permutation(size, (11,))(np.arange(size)) < size // 10)
    assert len(chosen) == size // 10
    assert p_value(np.bincount(chosen * 50 // size, minlength=50)) > 1e-4
    gaps = np.diff(chosen)
    assert stats.kstest(gaps - np.random.default_rng(0).random(len(gaps)),
                        stats.expon(scale=10).cdf).statistic < 0.05  # fmt: skip


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_impossible_sizes(size):
    with pytest.raises(ValueError, match=r"size: found .* 1 to 2\^62"):
        Permutation(size, (0,))
