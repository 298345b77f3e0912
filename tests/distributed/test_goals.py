"""Several goals: any number of ranks and any plan give the losses and weights of one process."""

import pytest

from stampede.engine.processes import processes
from stampede.engine.run import run
from support.goals import goal_config, goal_log, write_goals
from support.jobs import assert_same_training, same_end, train_an_epoch_in
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

# The last batch has fewer samples than ranks; in some batches no sample has the second goal.
ROWS = 961 + 64


def log_of(folder):
    frame = goal_log(ROWS)
    frame.loc[:200, "price_paid"] = float("nan")
    return write_goals(folder, frame)


def trained(folder, overrides, world_size=1):
    config = goal_config(folder, *overrides, world_size=world_size)
    with processes("cpu") as here:
        return train_an_epoch_in(here, config)


@pytest.mark.parametrize("plan, more", [
    ("row_wise", ["train.goal_weighting=uncertainty", "train.goals.buy=2"]),
    ("column_wise", ["model.name=ple", "data.shuffle=none", "data.split=sequential"]),
])  # fmt: skip
def test_two_ranks(tmp_path, plan, more):
    log_of(tmp_path)
    alone = trained(tmp_path, more)
    together = run_ranks(2, trained, tmp_path, [*more, f"sharding.plan={plan}"], 2)
    assert_same_training(alone, together[0])
    assert together[0].losses == together[1].losses and together[0].plan == {plan}
    for goal, found in alone.evaluation["goals"].items():
        other = together[0].evaluation["goals"][goal]
        assert other["auc"] == pytest.approx(found["auc"], abs=1e-4)
        assert other["samples"] == found["samples"] > 100


def run_on(folder, overrides, world_size=1):
    run(goal_config(folder, *overrides, world_size=world_size))


@pytest.mark.wide
def test_reproducible_to_the_last_bit(tmp_path):
    more = ["train.reproducible=true", "train.goal_weighting=uncertainty", "model.name=mmoe"]
    more += ["model.options={}"]
    log_of(tmp_path)
    run_on(tmp_path, [*more, "run.name=alone"])
    given = [*more, "run.name=together", "sharding.plan=table_wise"]
    run_ranks(4, run_on, tmp_path, given, 4)
    same_end(tmp_path / "alone", tmp_path / "together")
