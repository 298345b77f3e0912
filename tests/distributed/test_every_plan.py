"""One result on any plan and any number of processes: that of plain PyTorch in float64."""

from dataclasses import replace

import pytest

from support.parity import (
    TOLERANCE,
    assert_follows,
    deviation,
    reference_of,
    results_of,
    start_of,
)
from support.parity_cases import (
    PLANS,
    base_optimizers,
    corners,
    every_plan,
    family,
    odd_widths,
    own,
    queued,
    sequences,
)

pytestmark = pytest.mark.slow


def on(case, *plan):
    """A case with another plan, of each table: their gradients do not depend on each other."""
    return replace(case, plan=plan)


# All tables are on one plan where all rows move. Where only some do, and in what follows, a case
# has several plans.
UNIFORM = every_plan()[::2]
TOUCHED = [
    on(every_plan()[-1], "row_wise", "data_parallel", "row_wise", "grid_shard"),
    on(every_plan()[1], "table_row_wise", "column_wise", "table_wise", "table_column_wise"),
]
OF_ALL, OF_TOUCHED = odd_widths()[:5], odd_widths()[5:]
ODD = [
    on(OF_ALL[0], "table_row_wise", "row_wise", "data_parallel", "grid_shard"),
    on(OF_TOUCHED[0], "table_column_wise", "column_wise", "table_wise", "column_wise"),
    OF_ALL[-1],
    OF_TOUCHED[-1],
]
OWN = [
    on(own()[0], "row_wise", "data_parallel", "table_row_wise", "grid_shard"),
    on(own()[1], "table_wise", "column_wise", "table_wise", "table_column_wise"),
    on(own()[7], "data_parallel", "column_wise", "data_parallel", "grid_shard"),
    on(own()[10], "table_wise", "column_wise", "table_wise", "table_column_wise"),
]
# All rows move by each rule. Only some do by Adam above, by row-wise Adam and Adagrad where widths
# are odd and in sequences, by SGD in test_feature_processors.
BASE = [*base_optimizers()[::2], base_optimizers()[7]]
# What one or four processes may do otherwise than two is a matter of the plan and the clip.
ON = {
    1: (*UNIFORM, *TOUCHED, *corners(), *sequences()),
    2: (*UNIFORM, *TOUCHED, *family(), *corners(), *ODD, *BASE, *OWN, *queued(), *sequences()),
    4: (*UNIFORM, *TOUCHED, *family()[::2], *ODD),
}


@pytest.mark.parametrize(
    "count, case",
    [
        pytest.param(count, case, id=f"{count}-{case.plan}-{case.rule}-{case.arguments}")
        for count in ON
        for case in ON[count]
    ],
)
def test_the_result_is_that_of_one_process_in_float64(count, case):
    found = results_of(count, ON[count])[case]
    expected = assert_follows(case, found)
    assert found["counts"] == [expected.touched, expected.clipped, 0]
    if count == 2:
        would_notice(case, found, expected)


def would_notice(case, found, expected):
    """Rows are clipped and not clipped, ids repeat, and a wrong rule deviates."""
    if case.arguments.get("granularity") == "none":
        assert expected.clipped == 0
        return
    assert 0.2 < expected.clipped / expected.touched < 0.8
    assert expected.largest_count > 3
    start = start_of(case, found)
    for wrong in ({"granularity": "none"}, {"force_counts": 1}):
        other = reference_of(case, **wrong)
        assert deviation(start, found["weights"], other) > 100 * TOLERANCE


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


@pytest.mark.parametrize("count", ON)
@pytest.mark.parametrize("plan", PLANS)
def test_the_plan_is_what_was_asked_for(count, plan):
    found = results_of(count, ON[count])
    (case,) = (case for case in UNIFORM if case.plan == plan)
    assert set(found[case]["plan"].values()) == {plan}
    shards, ranks = found[case]["shards"]["t0"], found[case]["ranks"]["t0"]
    if plan in ("column_wise", "table_column_wise", "grid_shard"):
        assert {columns for _, columns in shards} == {4}
    if plan == "data_parallel":
        assert shards == ranks == []
        return
    per_node = min(count, 2)
    rows, on_ranks, on_nodes = placement(plan, count, per_node)
    assert {found_rows for found_rows, _ in shards} == {rows}
    assert len(set(ranks)) == on_ranks
    assert len({rank // per_node for rank in ranks}) == on_nodes


@pytest.mark.parametrize("count", [2, 4])
def test_columns_are_split_at_any_width(count):
    found = results_of(count, ON[count])
    for case in ODD:
        for index, table in enumerate(case.tables):
            shards = [columns for _, columns in found[case]["shards"][f"t{index}"]]
            if case.sharding_of(f"t{index}") == "column_wise" and table.columns:
                assert shards == list(table.columns)
            else:
                assert set(shards) <= {table.dim}
