"""One result on any plan and any number of processes: that of plain PyTorch in float64."""

from functools import cache

import pytest

from support.parity import deviation, run_cases, state_deviation, train_reference
from support.parity_cases import PLANS, base_optimizers, corners, drawn, every_plan, family
from support.ranks import run_ranks

# The largest deviation, of the largest movement, that float32 may make in 20 steps.
TOLERANCE = 1e-4
CASES = [*every_plan(), *family(), *base_optimizers(), *corners(), *drawn(16)]
# Four processes are two nodes of two, or table-row-wise and grid never cross nodes.
PROCESSES = {1: 1, 2: 2, 4: 2}


@pytest.fixture(scope="module", params=PROCESSES, ids=lambda count: f"{count} processes")
def results(request):
    """What every case gave on so many processes."""
    count, per_node = request.param, PROCESSES[request.param]
    ranks = run_ranks(count, run_cases, CASES, per_node, ranks_per_node=per_node)
    return count, dict(zip(CASES, ranks[0], strict=True))


@cache
def reference(case):
    """The same in float64; every plan and number of processes starts from the same values."""
    return train_reference(case, START[case])


START = {}


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.plan}-{case.rule}-{case.arguments}"
)
def test_the_result_is_that_of_one_process_in_float64(results, case):
    _, found = results
    start = START.setdefault(case, found[case]["start"])
    assert all(start[name].equal(found[case]["start"][name]) for name in start)
    expected = reference(case)
    assert deviation(case, start, found[case]["weights"], expected) < TOLERANCE
    assert state_deviation(case, found[case]["states"], expected) < TOLERANCE
    assert found[case]["counts"] == [expected.touched, expected.clipped, 0]


@pytest.mark.parametrize("plan", PLANS)
def test_the_plan_is_what_was_asked_for(results, plan):
    count, found = results
    for case in every_plan():
        if case.plan != plan:
            continue
        assert set(found[case]["plan"].values()) == {plan}
        shards = found[case]["shards"]["t0"]
        if plan in ("column_wise", "table_column_wise", "grid_shard"):
            assert {columns for _, columns in shards} == {4}
        if plan in ("row_wise", "grid_shard") and count > 1:
            assert len({rows for rows, _ in shards}) and shards[0][0] < 40


@pytest.mark.parametrize("case", every_plan(), ids=lambda case: f"{case.plan}-{case.arguments}")
def test_the_comparison_would_notice(results, case):
    """Rows are clipped and not clipped, ids repeat, and a wrong rule deviates."""
    _, found = results
    start = START.setdefault(case, found[case]["start"])
    expected = reference(case)
    assert 0.2 < expected.clipped / expected.touched < 0.8
    assert expected.largest_count > 3
    for wrong in ({"force_counts": 1}, {"granularity": "none"}):
        other = train_reference(case, start, **wrong)
        assert deviation(case, start, found[case]["weights"], other) > 100 * TOLERANCE


@pytest.mark.parametrize("case", family(), ids=lambda case: f"{case.plan}-{case.arguments}")
def test_every_clip_clips_sometimes(results, case):
    _, found = results
    START.setdefault(case, found[case]["start"])
    expected = reference(case)
    share = expected.clipped / expected.touched
    if case.arguments.get("granularity") == "none":
        assert share == 0
    else:
        assert 0.2 < share < 0.8
