"""Orders of rows: every row once an epoch, whatever the shuffle and the cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.data import Order

orders = st.builds(
    lambda rows, shuffle, seed, window: Order(rows, shuffle, seed, 4 * window, 4),
    st.integers(1, 300),
    st.sampled_from(["global", "block", "none"]),
    st.integers(0, 5),
    st.integers(0, 12),
)


@settings(max_examples=200, deadline=None)
@given(orders, st.integers(0, 3), st.integers(1, 50))
def test_an_epoch_visits_every_row_once_however_it_is_cut(order, epoch, cut):
    whole = order.rows_at(epoch, 0, order.rows)
    assert sorted(whole.tolist()) == list(range(order.rows))
    pieces = [
        order.rows_at(epoch, start, min(start + cut, order.rows), torch.arange)
        for start in range(0, order.rows, cut)
    ]
    assert torch.cat(pieces).tolist() == whole.tolist()


@settings(max_examples=200, deadline=None)
@given(orders, st.integers(0, 3))
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


def test_none_is_the_order_of_the_part():
    assert Order(10).rows_at(3, 2, 7).tolist() == [2, 3, 4, 5, 6]


def test_impossible_blocks_and_windows():
    with pytest.raises(ValueError, match="power of two"):
        Order(10, "block", 0, 12, 12)
    with pytest.raises(ValueError, match="multiple of 16"):
        Order(10, "block", 0, 24, 16)
