"""A batch that is poisoned on one rank: all leave it out together."""

import pytest

from support.diverging import run_poisoned_on_rank_1
from support.jobs import lines
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

LONG = ["train.epochs=2", "evaluate.every=3", "optim.dense.schedule.warmup=0",
        "checkpoint.every_steps=2", "sharding.plan=row_wise"]  # fmt: skip


def test_all_ranks_leave_a_batch_out(tmp_path):
    skips = [*LONG, "train.on_nonfinite=skip_batch"]
    run_ranks(2, run_poisoned_on_rank_1, tmp_path, skips, 2, [5])
    logged = lines(tmp_path / "small")
    assert [line["step"] for line in logged if line["kind"] == "skipped_batch"] == [5]
    assert all(line["loss"] > 0 for line in logged if line["kind"] == "train")
