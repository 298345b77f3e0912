"""Gradients of the dense layers, averaged over the ranks."""

import pytest

from support.networks import averaged_gradients
from support.ranks import run_ranks


@pytest.mark.slow
def test_ranks_may_give_gradients_to_different_parameters():
    for of_rank in run_ranks(2, averaged_gradients):
        assert [grad.tolist() for grad in of_rank] == [[2.0] * 2, [2.0] * 3, [0.0] * 4]
