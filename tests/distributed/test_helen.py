"""Helen in sharded tables: the result of the formulas in float64, on any plan."""

import pytest

from support.helen_parity import CASES, reference, train
from support.parity_reference import deviation
from support.ranks import run_ranks

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda count: f"{count} processes")
def results(request):
    ranks = run_ranks(request.param, train, CASES, ranks_per_node=min(request.param, 2))
    return dict(zip(CASES, ranks[0], strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.plan} {case.arguments}")
def test_follows_the_formulas_on_any_plan(results, case):
    start, weights = results[case]
    assert deviation(case, start, weights, reference(case, start)) < TOLERANCE
    for wrong in ({"rho": 0.0}, {"bound": 1.0}):
        assert deviation(case, start, weights, reference(case, start, **wrong)) > 10 * TOLERANCE
