"""Queued updates where a rank has no tables; Triton's interpreter runs the kernels."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from support.queued import train
from support.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("lookups", [(1, 1, 1), (1, 2, 2, 1)], ids=["one", "several"])
def test_all_ranks_take_the_same_way_also_one_without_tables(lookups):
    queued = run_ranks(2, train, "queued", lookups)
    swept = run_ranks(2, train, "kernels", lookups)
    assert [rank["is_queued"] for rank in queued] == [True, True]
    assert sorted(len(rank["weights"]) for rank in queued) == [0, 1]
    for one, other in zip(queued, swept, strict=True):
        assert one["weights"] == pytest.approx(other["weights"], rel=1e-6)


def test_all_ranks_learn_of_a_gradient_that_is_not_finite():
    ranks = run_ranks(2, train, "queued", (1, 1, 1), 1)
    assert [rank["found"] for rank in ranks] == [1, 1]
