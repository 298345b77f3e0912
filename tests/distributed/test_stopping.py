"""What happens to one rank of several, and runs that go on with other ranks, plans and kernels."""

import os
import shutil

import pytest
import torch

from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest
from stampede.engine.inference.trained import open_trained, whole_model
from stampede.optim import native
from support.jobs import lines, run_small, same_end
from support.ranks import run_ranks
from support.stopping import Setting, poisoned, stopped_on_last_rank, undisturbed_runs

pytestmark = pytest.mark.slow

LONG = ["train.epochs=2", "evaluate.every=3", "sharding.plan=row_wise"]

# Of the largest weight of a tensor, where sums are rounded in another order.
TOLERANCE = 2e-5


def check_weights(one, other):
    """Check that all tables and layers of two runs' newest checkpoints are nearly the same."""
    one, other = (
        whole_model(open_trained(run, "newest"), torch.device("cpu")).state_dict()
        for run in (one, other)
    )
    assert one.keys() == other.keys()
    for name, value in one.items():
        bound = TOLERANCE * float(other[name].abs().max())
        assert torch.allclose(value, other[name], rtol=0, atol=bound), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """On two ranks."""
    return undisturbed_runs(tmp_path_factory, LONG)(2)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A function that copies the run of two ranks that a signal has stopped into a folder."""
    folder = tmp_path_factory.mktemp("stopped")
    said = run_ranks(2, stopped_on_last_rank, folder, LONG, 2, 5)
    assert len(set(said)) == 1 and "SIGTERM after step 5" in said[0]
    assert read_manifest(newest(folder / "small/checkpoints")).progress.step == 5
    return lambda other: shutil.copytree(folder / "small", other / "small")


# Fewer ranks go on in test_same_result.
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "plan, ranks, check", [("row_wise", 2, same_end), ("column_wise", 4, check_weights)]
)
def test_a_signal_to_one_rank_stops_all_and_any_ranks_and_plan_go_on(
    tmp_path, undisturbed, stopped, plan, ranks, check
):
    stopped(tmp_path)
    overrides = [*LONG[:2], f"sharding.plan={plan}", "checkpoint.resume=auto"]
    run_ranks(ranks, run_small, tmp_path, overrides, ranks)
    check(tmp_path / "small", undisturbed)


def run_without_kernels(*arguments):
    """A run whose tables plain PyTorch updates; as a rank of several, of which each is new."""
    os.environ["STAMPEDE_NATIVE"] = "0"
    assert not native.available()
    run_small(*arguments)


def test_plain_pytorch_goes_on_where_the_kernels_stopped(tmp_path, undisturbed, stopped):
    assert native.available()
    stopped(tmp_path)
    run_ranks(2, run_without_kernels, tmp_path, [*LONG, "checkpoint.resume=auto"], 2)
    check_weights(tmp_path / "small", undisturbed)


def run_poisoned_on_rank_1(*arguments):
    poisoned(Setting, [5], on_rank=1)
    run_small(*arguments)


def test_all_ranks_leave_out_a_batch_that_is_not_finite_on_one(tmp_path):
    overrides = [*LONG[1:], "optim.dense.schedule.warmup=0", "train.on_nonfinite=skip_batch"]
    run_ranks(2, run_poisoned_on_rank_1, tmp_path, overrides, 2)
    logged = lines(tmp_path / "small")
    assert [line["step"] for line in logged if line["kind"] == "skipped_batch"] == [5]
    assert all(line["loss"] > 0 for line in logged if line["kind"] == "train")
