"""What happens to one rank of several, and runs that go on with other ranks, plans and kernels."""

import shutil
from functools import cache

import pytest

from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest
from stampede.optim import native
from support.diverging import run_poisoned_on_rank_1
from support.jobs import assert_same_lines, check_weights, lines, run_small
from support.ranks import run_ranks
from support.stopping import run_without_kernels, stopped_on_last_rank, undisturbed_runs

pytestmark = pytest.mark.slow

LONG = ["train.epochs=2", "evaluate.every=3", "sharding.plan=row_wise"]

# Of the largest weight of a tensor, where sums are rounded in another order.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """On two ranks."""
    return undisturbed_runs(tmp_path_factory, LONG)(2)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A function that copies the run of some ranks that a signal has stopped into a folder."""

    @cache
    def run(ranks):
        folder = tmp_path_factory.mktemp("stopped")
        said = run_ranks(ranks, stopped_on_last_rank, folder, LONG, ranks, 5)
        assert len(set(said)) == 1 and "SIGTERM after step 5" in said[0]
        assert read_manifest(newest(folder / "small/checkpoints")).progress.step == 5
        return folder / "small"

    return lambda folder, ranks: shutil.copytree(run(ranks), folder / "small")


@pytest.mark.parametrize("before, plan, after", [
    (2, "row_wise", 2), (2, "column_wise", 4), (1, "row_wise", 2), (4, "table_wise", 1),
])  # fmt: skip
def test_a_signal_to_one_rank_stops_all_and_any_ranks_and_plan_go_on(
    tmp_path, undisturbed, stopped, before, plan, after
):
    stopped(tmp_path, before)
    overrides = [*LONG[:2], f"sharding.plan={plan}", "checkpoint.resume=auto"]
    run_ranks(after, run_small, tmp_path, overrides, after)
    same = (before, plan, after) == (2, "row_wise", 2)
    if same:
        assert_same_lines(tmp_path / "small", undisturbed)
    check_weights(tmp_path / "small", undisturbed, 0 if same else TOLERANCE)


def test_plain_pytorch_goes_on_where_the_kernels_stopped(tmp_path, undisturbed, stopped):
    assert native.available()
    stopped(tmp_path, 2)
    run_ranks(2, run_without_kernels, tmp_path, [*LONG, "checkpoint.resume=auto"], 2)
    check_weights(tmp_path / "small", undisturbed, TOLERANCE)


def test_all_ranks_leave_out_a_batch_that_is_not_finite_on_one(tmp_path):
    overrides = [*LONG, "optim.dense.schedule.warmup=0", "train.on_nonfinite=skip_batch"]
    run_ranks(2, run_poisoned_on_rank_1, tmp_path, overrides, 2, [5])
    logged = lines(tmp_path / "small")
    assert [line["step"] for line in logged if line["kind"] == "skipped_batch"] == [5]
    assert all(line["loss"] > 0 for line in logged if line["kind"] == "train")
