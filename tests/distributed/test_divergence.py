"""A batch that is poisoned on one rank: all are rolled back, or leave it out, together."""

import pytest

from support.diverging import run_poisoned_on_rank_1
from support.jobs import lines, run_small, without_times
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

LONG = ["train.epochs=2", "evaluate.every=3", "optim.dense.schedule.warmup=0",
        "checkpoint.every_steps=2", "sharding.plan=row_wise"]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_are_rolled_back(tmp_path, ranks):
    """From a checkpoint, and as a run that had the lower rate from the beginning on."""
    for name in ("late", "early", "low"):
        (tmp_path / name).mkdir()
    once = [*LONG, "train.on_divergence.rollbacks=1"]
    run_ranks(ranks, run_poisoned_on_rank_1, tmp_path / "late", once, ranks, [7], 4e-4)
    (line,) = [line for line in lines(tmp_path / "late/small") if line["kind"] == "rollback"]
    assert (line["step"], line["diverged_step"]) == (6, 7)
    run_ranks(ranks, run_poisoned_on_rank_1, tmp_path / "early", once, ranks, [2], 4e-4)
    run_ranks(ranks, run_small, tmp_path / "low", [*LONG, "optim.dense.lr=5e-4"], ranks)
    rolled_back = without_times(tmp_path / "early/small")
    assert (rolled_back[0]["kind"], rolled_back[0]["step"]) == ("rollback", 0)
    assert rolled_back[1:] == without_times(tmp_path / "low/small")


def test_all_ranks_leave_a_batch_out(tmp_path):
    skips = [*LONG, "train.on_nonfinite=skip_batch"]
    run_ranks(2, run_poisoned_on_rank_1, tmp_path, skips, 2, [5], 0.0)
    logged = lines(tmp_path / "small")
    assert [line["step"] for line in logged if line["kind"] == "skipped_batch"] == [5]
    assert all(line["loss"] > 0 for line in logged if line["kind"] == "train")
