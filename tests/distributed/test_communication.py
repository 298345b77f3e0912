"""Embeddings and gradients sent in lower precision: close to float64, with exact counts."""

import pytest

from support.parity import Case, Table, deviation, run_cases, train_reference
from support.ranks import run_ranks

TABLES = (Table(40), Table(60))
PRECISIONS = {("fp16", "fp32"): 2e-3, ("bf16", "bf16"): 3e-2}
CASES = [
    Case(plan, TABLES, sequence=sequence, steps=6, communication=precisions)
    for precisions in PRECISIONS
    for sequence, plans in (
        (False, ("row_wise", "grid_shard", ("column_wise", "data_parallel"))),
        (True, ("row_wise",)),
    )
    for plan in plans
]


@pytest.fixture(scope="module")
def results():
    """Of every case, on two nodes of two ranks."""
    return run_ranks(4, run_cases, CASES, ranks_per_node=2)[0]


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "index", range(len(CASES)), ids=lambda i: f"{CASES[i].plan}-{CASES[i].communication}-{i}"
)
def test_lower_precision_stays_near_the_equations(results, index):
    case, result = CASES[index], results[index]
    reference = train_reference(case, result["start"])
    found = deviation(result["start"], result["weights"], reference)
    # It is used, and no more than rounding.
    assert 1e-5 < found < PRECISIONS[case.communication]
    assert result["counts"][0] == reference.touched
    assert abs(result["counts"][1] - reference.clipped) <= 0.01 * reference.touched
    # The counts matter, and the test sees it.
    wrong = train_reference(case, result["start"], force_counts=1)
    assert deviation(result["start"], result["weights"], wrong) > 5 * found
