"""Signals to one rank of several, and runs that go on with other ranks, plans and kernels."""

import shutil

import pytest

from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest
from stampede.optim import native
from support.jobs import run_small, without_times
from support.ranks import run_ranks
from support.stopping import run_without_kernels, stopped_on_last_rank
from support.weights import check_weights

pytestmark = pytest.mark.slow

LONG = ["train.epochs=2", "evaluate.every=3", "sharding.plan=row_wise"]

# Of the largest weight of a tensor, where sums are rounded in another order.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """On two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(2, run_small, folder, LONG, 2)
    return folder / "small"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A function that copies the run of some ranks that a signal has stopped into a folder."""
    made = {}

    def copy_to(folder, ranks):
        if ranks not in made:
            made[ranks] = tmp_path_factory.mktemp("stopped")
            said = run_ranks(ranks, stopped_on_last_rank, made[ranks], LONG, ranks, 5)
            assert len(set(said)) == 1 and "SIGTERM after step 5" in said[0]
            saved = newest(made[ranks] / "small/checkpoints")
            assert read_manifest(saved).progress.step == 5
        shutil.copytree(made[ranks] / "small", folder / "small")

    return copy_to


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
        assert without_times(tmp_path / "small") == without_times(undisturbed)
    check_weights(tmp_path / "small", undisturbed, 0 if same else TOLERANCE)


def test_plain_pytorch_goes_on_where_the_kernels_stopped(tmp_path, undisturbed, stopped):
    assert native.available()
    stopped(tmp_path, 2)
    run_ranks(2, run_without_kernels, tmp_path, [*LONG, "checkpoint.resume=auto"], 2)
    check_weights(tmp_path / "small", undisturbed, TOLERANCE)
