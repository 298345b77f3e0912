"""Permutations, and the order of rows made of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from stampede.data import Order
from stampede.data.order import Permutation


def orders(*shuffles):
    return st.builds(
        lambda rows, shuffle, seed, window: Order(rows, shuffle, seed, 4 * window, 4),
        st.integers(1, 300),
        st.sampled_from(shuffles),
        st.integers(0, 5),
        st.integers(0, 12),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(orders("global", "block", "rotate", "none"), st.integers(0, 3), st.integers(1, 50))
def test_an_epoch_visits_every_row_once_however_it_is_cut(order, epoch, cut):
    whole = order.rows_at(epoch, 0, order.rows)
    assert sorted(whole.tolist()) == list(range(order.rows))
    pieces = [
        order.rows_at(epoch, start, min(start + cut, order.rows), torch.arange)
        for start in range(0, order.rows, cut)
    ]
    assert torch.cat(pieces).tolist() == whole.tolist()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(orders("global", "block", "none"), st.integers(0, 3))
def test_the_ranges_of_the_windows_are_what_their_positions_read(order, epoch):
    whole = order.rows_at(epoch, 0, order.rows)
    last = order.window_at(order.rows - 1)
    for number in range(last + 1):
        ranges = order.window_ranges(epoch, number)
        promised = [row for first, end in ranges.tolist() for row in range(first, end)]
        here = whole[number * order.window : (number + 1) * order.window]
        assert sorted(promised) == sorted(here.tolist())
    assert len(order.window_ranges(epoch, last + 1)) == 0


@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_seed_and_epoch_change_the_order(shuffle):
    def whole(seed, epoch):
        return Order(500, shuffle, seed, 64, 16).rows_at(epoch, 0, 500).tolist()

    assert whole(0, 0) == whole(0, 0)
    assert len({tuple(whole(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_later_epochs_rotate_the_rows():
    order = Order(500, "rotate", 1)
    first, *later = (order.rows_at(epoch, 0, 500) for epoch in range(4))
    assert first.tolist() == list(range(500))
    assert len({rows[0] for rows in later} - {0}) == 3
    for rows in later:
        assert rows.tolist() == np.roll(np.arange(500), -rows[0]).tolist()


def test_a_block_shuffle_mixes_rows_of_a_window_and_blocks_of_the_part():
    order = Order(64_000, "block", 1, 8 * 512, 512)
    first = order.rows_at(0, 0, 8 * 512)
    # 8 blocks from all over the part, and all their rows mixed.
    spread = [end - start for start, end in order.window_ranges(0, 0).tolist()]
    assert sum(spread) == 8 * 512 and max(spread) == 512
    assert np.ptp(first) > 32_000
    block = first // 512
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05
    assert np.mean(block[:-1] == block[1:]) < 0.2
    # Blocks begin elsewhere in another epoch: rows meet other rows.
    edges = [set((order.window_ranges(epoch, 0)[:, 0] % 512).tolist()) for epoch in range(4)]
    assert len(set().union(*edges)) >= 4


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**62), st.integers(0, 100), st.data())
def test_torch_and_numpy_agree_and_positions_stay_distinct_at_any_size(size, key, data):
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
    """Of a chi-squared test that all counts are equal but for chance."""
    return stats.chisquare(np.ravel(counts)).pvalue


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("size", [2, 3, 10, 64])
def test_small_sets_over_many_keys(size):
    orders = np.stack([Permutation(size, (7, key))(np.arange(size)) for key in range(1000)])
    places = [np.bincount(column, minlength=size) for column in orders.T]
    assert p_value(places) > 1e-4
    if size > 2:
        steps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % size).ravel(), minlength=size)
        assert p_value(steps[1:]) > 1e-4


@pytest.mark.parametrize("size", [1000, 4096, 100_003, 2**20 + 1])
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
    # A random permutation leaves one number in its place on average.
    assert (permuted == np.arange(size)).sum() < 10
    assert abs((np.diff(permuted) > 0).mean() - 0.5) < 3 / np.sqrt(size)
