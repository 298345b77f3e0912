"""torch.distributed.checkpoint: state under one plan and number of ranks, read under another."""

import pytest
import torch

from support.parity import Case, Table
from support.programs import save_and_load
from support.ranks import run_ranks

TABLES = (Table(40), Table(23, 10, 2, columns=(5, 5)), Table(60, 7, mean=True))
MIXED = ("row_wise", "column_wise", "data_parallel")
# Every plan is written and read, and one is kept.
PLANS = [
    ("table_wise", "column_wise"),
    ("column_wise", "row_wise"),
    ("row_wise", "data_parallel"),
    ("data_parallel", MIXED),
    (MIXED, "table_wise"),
    ("column_wise", "column_wise"),
]
STATES = {
    "adam": {"momentum1", "exp_avg_sq", "step"},
    "rowwise_adam": {"momentum1", "exp_avg_sq", "step"},
    "sgd": {"step"},
}


def cases(plans_of_rules, side):
    return [
        Case(plans[side], TABLES, rule=rule)
        for rule, pairs in plans_of_rules.items()
        for plans in pairs
    ]


def assert_continued(before, after, saved, loaded, same_ranks):
    for old, new, (at_save, next_of_saved), (at_load, next_of_loaded) in zip(
        before, after, saved, loaded, strict=True
    ):
        assert_same(at_save, at_load, exactly=True)
        assert_same(next_of_saved, next_of_loaded, exactly=same_ranks and old.plan == new.plan)
        for name in old.names:
            assert at_save["states"][name].keys() == STATES[old.rule]
            assert int(at_load["states"][name]["step"]) == 3
            assert int(next_of_loaded["states"][name]["step"]) == 4


def assert_same(one, other, exactly):
    tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.slow
def test_state_continues_under_another_plan(tmp_path):
    # The other plans of the first two go to other ranks, below.
    pairs = {"adam": PLANS[::2], "rowwise_adam": PLANS[1::2], "sgd": PLANS[4:]}
    before, after = cases(pairs, 0), cases(pairs, 1)
    saved, loaded = save_and_load(before, tmp_path, after, tmp_path)
    assert_continued(before, after, saved, loaded, same_ranks=True)


@pytest.mark.slow
def test_state_continues_on_another_number_of_ranks(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    before, after = (cases({"adam": PLANS[1::2]}, side) for side in (0, 1))
    rowwise, other_rowwise = (cases({"rowwise_adam": PLANS[::2]}, side) for side in (0, 1))
    by_one, _ = save_and_load(before, alone, [], alone)
    by_two, of_one = run_ranks(2, save_and_load, rowwise, together, after, alone)[0]
    _, of_two = save_and_load([], alone, other_rowwise, together)
    assert_continued(before, after, by_one, of_one, same_ranks=False)
    assert_continued(rowwise, other_rowwise, by_two, of_two, same_ranks=False)
