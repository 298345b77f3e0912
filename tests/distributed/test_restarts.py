"""Workers of torchrun that die, hang or are slow, and a signal or a NaN on one rank of several."""

import os
import re
import shutil
import time
from functools import cache

import pytest

from stampede.engine import step
from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest, verify
from stampede.optim import native
from support.diverging import run_poisoned_on_rank_1
from support.forked import ended, torchrun
from support.jobs import SMALL, assert_same_lines, check_weights, lines, run_small
from support.monitored import logged
from support.paths import ROOT
from support.ranks import run_ranks
from support.stopping import run_without_kernels, stopped_on_last_rank, undisturbed_runs
from support.waiting import HANG

pytestmark = pytest.mark.slow

# 8 steps an epoch.
LONG = ["train.epochs=2", "evaluate.every=3", "checkpoint.every_steps=3", "sharding.plan=row_wise"]
# Seconds; longer than any step takes, also on a machine that has more to do.
PATIENCE = 15


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs that nothing happened to, by number of ranks."""
    return undisturbed_runs(tmp_path_factory, LONG)


def start(folder, fault, *overrides, **options):
    """The launcher with a fault under torchrun; the options are those of `support.forked`'s."""
    (folder / "small.yaml").write_text("")
    given = [fault, folder / "small.yaml", f"run.dir={folder}", *SMALL, *LONG, *overrides]
    options = {"ranks": 2, "restarts": 2, **options}
    return torchrun(ROOT / "tests/support/failing_launch.py", given, **options)


def train(*arguments, **options):
    """The same, to its end."""
    return ended(start(*arguments, **options), HANG)


def same_run(one, other):
    assert_same_lines(one, other)
    check_weights(one, other)


def went_on(done, folder, undisturbed, *steps):
    """Whether it ended well, each time continued after one of these steps."""
    assert done.returncode == 0, done.stderr
    continued = [int(step) for step in re.findall(r"continuing after step (\d+) from", done.stdout)]
    assert len(continued) == len(steps), done.stdout
    assert all(map(list.__contains__, steps, continued)), done.stdout
    same_run(folder / "small", undisturbed)


def test_workers_that_sleep_or_are_killed_are_replaced(tmp_path, undisturbed):
    """One sleeps, then that of rank 0 is killed, which holds the lock and writes all files."""
    # A run that is to be replaced, which a restart must not do once more.
    (tmp_path / "small").mkdir()
    (tmp_path / "small/config.yaml").write_text("")
    faults = "sleep:1:6,kill:0:14:2"
    done = train(tmp_path, faults, "run.overwrite=true", f"run.hang_seconds={PATIENCE}")
    assert "Traceback" not in done.stderr
    went_on(done, tmp_path, undisturbed(2), [3], [12, 9])
    said = next(line for line in done.stderr.splitlines() if "the run hangs" in line)
    found = re.search(r"rank 1 makes no progress: at step 5, between steps, for (\d+)", said)
    assert int(found[1]) >= PATIENCE
    assert "its processes end with status 3; a restart by torchrun, or " in said
    assert done.stderr.count("the run hangs") == 1
    for rank, place in enumerate(("train_step", "sleep_in_python")):
        told = (tmp_path / f"small/hang_rank_{rank}.txt").read_text()
        assert f"in {place}" in told
        assert f"\nrank {rank} makes no progress: at step {6 - rank}, " in told
    # The logs of all ranks are whole, and tell of all starts.
    for rank in range(2):
        log = logged(tmp_path / "small", rank)
        starts = [line for line in log if line["event"] == "started"]
        assert [line["restart"] for line in starts] == [0, 1, 2] and log[-1]["event"] == "ended"


def test_a_signal_to_torchrun_saves_before_it_kills(tmp_path, undisturbed):
    """It hands the signal on, and ends after its own 30 seconds what has not ended by then."""
    metrics = tmp_path / "small/metrics.jsonl"
    with start(tmp_path, "slow:0:3", restarts=0, seconds=None) as process:
        try:
            deadline = time.monotonic() + HANG
            while not (metrics.exists() and '"train"' in metrics.read_text()):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.terminate()
            begun = time.monotonic()
            said, complaints = process.communicate(timeout=HANG)
            seconds = time.monotonic() - begun
        finally:
            process.terminate()
    # torchrun would have waited 30 seconds for what had not ended.
    assert process.returncode != 0 and seconds < 30, complaints
    step = int(re.search(r"stopped by SIGTERM after step (\d+), which is saved", said)[1])
    saved = newest(tmp_path / "small/checkpoints")
    verify(saved)
    assert read_manifest(saved).progress.step == step < 16
    run_ranks(2, run_small, tmp_path, [*LONG, "checkpoint.resume=auto"], 2)
    starts = [line["step"] for line in logged(tmp_path / "small") if line["event"] == "started"]
    assert starts == [0, step]
    same_run(tmp_path / "small", undisturbed(2))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [(), ("--standalone",), ("--master_port", "29617")])
def test_every_rendezvous_forgets_the_killed(tmp_path, undisturbed, ranks, options):
    done = train(tmp_path, f"kill:{ranks - 1}:14", ranks=ranks, options=options)
    went_on(done, tmp_path, undisturbed(ranks), [12, 9])


@pytest.mark.soak
@pytest.mark.parametrize("ranks, rank", [(2, 1), (2, 0), (4, 2)])
def test_a_stopped_worker_is_named_and_replaced(tmp_path, undisturbed, ranks, rank):
    done = train(tmp_path, f"stop:{rank}:10", f"run.hang_seconds={PATIENCE}", ranks=ranks)
    assert f"the run hangs: rank {rank} is stopped, dead or out of reach, " in done.stderr
    assert "the others wait at step 10, " in done.stderr
    assert done.stderr.count("the run hangs") == 1
    went_on(done, tmp_path, undisturbed(ranks), [9, 8])


# Of the largest weight of a tensor, where sums are rounded in another order.
TOLERANCE = 2e-5


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
    overrides = [*LONG[:3], f"sharding.plan={plan}", "checkpoint.resume=auto"]
    run_ranks(after, run_small, tmp_path, overrides, after)
    same = (before, plan, after) == (2, "row_wise", 2)
    if same:
        assert_same_lines(tmp_path / "small", undisturbed(2))
    check_weights(tmp_path / "small", undisturbed(2), 0 if same else TOLERANCE)


def test_plain_pytorch_goes_on_where_the_kernels_stopped(tmp_path, undisturbed, stopped):
    assert native.available()
    stopped(tmp_path, 2)
    run_ranks(2, run_without_kernels, tmp_path, [*LONG, "checkpoint.resume=auto"], 2)
    check_weights(tmp_path / "small", undisturbed(2), TOLERANCE)


def test_all_ranks_leave_out_a_batch_that_is_not_finite_on_one(tmp_path):
    overrides = [*LONG, "optim.dense.schedule.warmup=0", "train.on_nonfinite=skip_batch"]
    run_ranks(2, run_poisoned_on_rank_1, tmp_path, overrides, 2, [5])
    logged = lines(tmp_path / "small")
    assert [line["step"] for line in logged if line["kind"] == "skipped_batch"] == [5]
    assert all(line["loss"] > 0 for line in logged if line["kind"] == "train")


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
