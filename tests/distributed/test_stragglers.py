"""A rank that is slower than the others is named, though all of them take equally long."""

import pytest

from stampede.engine.monitoring.trace import trace_file
from support.jobs import lines
from support.monitored import logged, run_with_a_slow_rank
from support.ranks import run_ranks

# Of a step, whose work takes a tenth of it.
SLEPT = 0.15


@pytest.mark.parametrize("slow", [0, 1])
def test_the_slow_rank_is_named(tmp_path, slow):
    overrides = ["train.timing_every=4", "evaluate.every=3", "sharding.plan=row_wise"]
    overrides += ["train.profile.start=2", "train.profile.steps=1"]
    run_ranks(2, run_with_a_slow_rank, tmp_path, overrides, 2, slow, SLEPT)
    timing = [line for line in lines(tmp_path / "small") if line["kind"] == "timing"]
    assert [line["step"] for line in timing] == [4, 8]
    assert [line["slowest_seconds"]["rank"] for line in timing] == [slow, slow]
    # The first steps load what the later ones need.
    line = timing[-1]
    assert line["slowest_seconds"]["own"] > SLEPT > 0.5 * SLEPT > line["slowest_seconds"]["others"]
    assert line["step_seconds"]["p50"] > SLEPT
    # One of two ranks waits for most of each step.
    assert 0.4 * SLEPT < line["communication_seconds"] < line["step_seconds"]["mean"]
    of_ranks = [
        [line for line in logged(tmp_path / "small", rank) if line["event"] == "timing"]
        for rank in range(2)
    ]
    for mine, other in zip(of_ranks[slow], of_ranks[1 - slow], strict=True):
        assert mine["phase_seconds"]["computing"] > SLEPT > other["phase_seconds"]["computing"]
        # In the mean of some steps both last equally long, to what ranks are apart in one.
        assert mine["step_seconds"]["mean"] == pytest.approx(
            other["step_seconds"]["mean"], abs=0.5 * SLEPT
        )
    shares = [of_ranks[rank][-1]["communication_share"] for rank in (slow, 1 - slow)]
    assert shares[0] < 0.5 < shares[1]
    assert all(trace_file(tmp_path / "small", rank).stat().st_size > 1000 for rank in range(2))
