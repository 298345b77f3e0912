"""Gradients of the dense layers, averaged over the ranks."""

import pytest
import torch

from support.networks import averaged_gradients, sums_in_order
from support.ranks import run_ranks


@pytest.mark.slow
def test_ranks_may_give_gradients_to_different_parameters():
    for of_rank in run_ranks(2, averaged_gradients):
        assert [grad.tolist() for grad in of_rank] == [[2.0] * 2, [2.0] * 3, [0.0] * 4]


@pytest.mark.slow
def test_sums_of_tiles_have_the_same_bits_on_any_number_of_ranks():
    alone, in_another_order = run_ranks(1, sums_in_order)[0]
    # The sums depend on the order, so that the same bits are no accident.
    assert not torch.equal(alone, in_another_order)
    for ranks in (2, 4):
        for found, _ in run_ranks(ranks, sums_in_order):
            assert torch.equal(found, alone)
