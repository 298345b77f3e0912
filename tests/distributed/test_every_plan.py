"""One result on any plan and any number of processes: that of plain PyTorch in float64."""

from functools import cache

import pytest

from support.parity import run_cases
from support.parity_cases import (
    PLANS,
    base_optimizers,
    corners,
    drawn,
    every_plan,
    family,
    odd_widths,
    queued,
    sequences,
)
from support.parity_reference import deviation, state_deviation, train_reference
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

# The largest deviation, of the largest movement, that float32 may make in 6 steps.
TOLERANCE = 1e-4
# What one or four processes may do otherwise than two is a matter of the plan and the clip.
CASES = [
    *every_plan(), *family(), *corners(), *odd_widths(), *base_optimizers(), *drawn(), *queued(),
    *sequences(),
]  # fmt: skip
ON = {
    1: [*every_plan(), *corners(), *sequences()],
    2: CASES,
    4: [*every_plan(), *family()[::2], *odd_widths()],
}
# Four processes are two nodes of two, or table-row-wise and grid never cross nodes.
PROCESSES = {1: 1, 2: 2, 4: 2}


@cache
def results(count):
    """What every case gave on so many processes."""
    per_node = PROCESSES[count]
    ranks = run_ranks(count, run_cases, ON[count], per_node, ranks_per_node=per_node)
    return dict(zip(ON[count], ranks[0], strict=True))


@cache
def reference(case):
    """The same in float64; every plan and number of processes starts from the same values."""
    return train_reference(case, START[case])


START = {}


@pytest.mark.parametrize(
    "count, case",
    [
        pytest.param(count, case, id=f"{count}-{case.plan}-{case.rule}-{case.arguments}")
        for count in PROCESSES
        for case in ON[count]
    ],
)
def test_the_result_is_that_of_one_process_in_float64(count, case):
    found = results(count)
    start = START.setdefault(case, found[case]["start"])
    assert all(start[name].equal(found[case]["start"][name]) for name in start)
    expected = reference(case)
    assert deviation(case, start, found[case]["weights"], expected) < TOLERANCE
    assert state_deviation(case, found[case]["states"], expected) < TOLERANCE
    assert found[case]["counts"] == [expected.touched, expected.clipped, 0]
    if count == 2:
        would_notice(case, found[case]["weights"], expected)


def would_notice(case, weights, expected):
    """Rows are clipped and not clipped, ids repeat, and a wrong rule deviates."""
    granularity = case.arguments.get("granularity", "cowclip")
    if granularity == "none":
        assert expected.clipped == 0
        return
    assert 0.2 < expected.clipped / expected.touched < 0.8
    assert expected.largest_count > 3
    wrongs = [{"granularity": "none"}]
    if granularity in ("cowclip", "row", "quantile"):
        wrongs.append({"force_counts": 1})
    if case.arguments.get("ar_alpha"):
        wrongs.append({"ar_alpha": 0.0})
    for wrong in wrongs:
        other = train_reference(case, START[case], **wrong)
        assert deviation(case, START[case], weights, other) > 100 * TOLERANCE


def placement(plan, processes, per_node):
    """Of 40 rows and 12 columns: rows of a shard, and how many ranks and nodes have one."""
    nodes = processes // per_node
    return {
        "table_wise": (40, 1, 1),
        "row_wise": (40 // processes, processes, nodes),
        "column_wise": (40, min(3, processes), nodes),
        "table_row_wise": (40 // per_node, per_node, 1),
        "table_column_wise": (40, per_node, 1),
        "grid_shard": (40 // per_node, processes, nodes),
    }[plan]


@pytest.mark.parametrize("count", PROCESSES)
@pytest.mark.parametrize("plan", PLANS)
def test_the_plan_is_what_was_asked_for(count, plan):
    found = results(count)
    for case in every_plan():
        if case.plan != plan:
            continue
        assert set(found[case]["plan"].values()) == {plan}
        shards, ranks = found[case]["shards"]["t0"], found[case]["ranks"]["t0"]
        if plan in ("column_wise", "table_column_wise", "grid_shard"):
            assert {columns for _, columns in shards} == {4}
        if plan == "data_parallel":
            assert shards == ranks == []
            continue
        per_node = PROCESSES[count]
        rows, on_ranks, on_nodes = placement(plan, count, per_node)
        assert {found_rows for found_rows, _ in shards} == {rows}
        assert len(set(ranks)) == on_ranks
        assert len({rank // per_node for rank in ranks}) == on_nodes


@pytest.mark.parametrize("count", [2, 4])
def test_columns_are_split_at_any_width(count):
    found = results(count)
    for case in odd_widths():
        for index, table in enumerate(case.tables):
            shards = [columns for _, columns in found[case]["shards"][f"t{index}"]]
            if case.sharding_of(f"t{index}") == "column_wise" and table.columns:
                assert shards == list(table.columns)
            else:
                assert set(shards) <= {table.dim}
