"""A stop on one rank stops all, with the weights of the step before."""

import pytest

from support.jobs import poison_rank_1
from support.ranks import run_ranks


@pytest.mark.slow
def test_one_poisoned_rank_stops_both(tmp_path):
    first, second = run_ranks(2, poison_rank_1, tmp_path)
    assert first == second
    said, untouched = first
    assert "nan at step 3" in said and untouched
