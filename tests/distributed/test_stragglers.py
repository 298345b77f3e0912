"""A rank that is slower than the others is named, though all of them take equally long."""

import os
import time

import pytest

from stampede.engine import step
from support.jobs import lines, run_small
from support.monitored import logged
from support.ranks import run_ranks

# Seconds of a step, whose work takes some hundredths, many times more on a busy machine.
SLEPT = 0.5


def run_with_a_slow_rank(folder, overrides, world_size, slow):
    """A whole run as a rank of several, of which one sleeps in every step."""
    if os.environ["RANK"] == str(slow):
        dense_pass = step._dense_pass

        def slowed(*arguments):
            time.sleep(SLEPT)
            return dense_pass(*arguments)

        step._dense_pass = slowed
    run_small(folder, overrides, world_size)


@pytest.mark.wide
def test_the_slow_rank_is_named(tmp_path, slow=1):
    overrides = ["train.timing_every=4", "evaluate.every=3", "sharding.plan=row_wise"]
    overrides += ["train.profile.start=2", "train.profile.steps=1"]
    run_ranks(2, run_with_a_slow_rank, tmp_path, overrides, 2, slow)
    timing = [line for line in lines(tmp_path / "small") if line["kind"] == "timing"]
    assert [line["step"] for line in timing] == [4, 8]
    # The first steps load what the later ones need.
    line, slowest = timing[-1], timing[-1]["slowest_seconds"]
    assert slowest["rank"] == slow
    assert slowest["own"] > SLEPT and slowest["own"] - slowest["others"] > 0.5 * SLEPT
    # One of two ranks waits for most of each step.
    assert 0.25 * SLEPT < line["communication_seconds"] < line["step_seconds"]["mean"]
    mine, other = (
        [line for line in logged(tmp_path / "small", rank) if line["event"] == "timing"][-1]
        for rank in (slow, 1 - slow)
    )
    assert other["communication_seconds"] - mine["communication_seconds"] > 0.5 * SLEPT
    for rank in range(2):
        assert (tmp_path / f"small/profile/rank_{rank}.pt.trace.json.gz").stat().st_size > 1000
