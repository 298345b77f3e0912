"""Helen in sharded tables: the result of the formulas in float64, on any plan."""

from functools import cache

import pytest

from support import helen_parity
from support.helen_parity import CASES, train
from support.parity_reference import deviation
from support.ranks import run_ranks

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda count: f"{count} processes")
def results(request):
    ranks = run_ranks(request.param, train, CASES, ranks_per_node=min(request.param, 2))
    return dict(zip(CASES, ranks[0], strict=True))


START = {}


@cache
def reference(index, **wrong):
    """In float64; every number of processes starts from the same values."""
    return helen_parity.reference(CASES[index], START[index], **wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", range(len(CASES)), ids=lambda i: f"{CASES[i].plan} {CASES[i].arguments}"
)
def test_follows_the_formulas_on_any_plan(results, index):
    case = CASES[index]
    found, weights = results[case]
    start = START.setdefault(index, found)
    assert all(start[name].equal(found[name]) for name in start)
    assert deviation(case, start, weights, reference(index)) < TOLERANCE
    for wrong in ({"rho": 0.0}, {"bound": 1.0}):
        assert deviation(case, start, weights, reference(index, **wrong)) > 10 * TOLERANCE
