"""Workers of torchrun that die or hang: the job goes on without a human, as if nothing had been.

A checkpoint that was still being written when they died does not count: the one before does.
"""

import re
import signal
import time
from functools import partial

import pytest

from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest, verify
from support.forked import ended
from support.jobs import SMALL, run_small, same_end
from support.monitored import logged
from support.ranks import run_ranks
from support.soak import at_step, disturbed_torchrun, sleep_in_python, slow_down
from support.stopping import undisturbed_runs
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


def start(folder, disturbances, *overrides, ranks=2, restarts=2, **options):
    """The launcher under torchrun, see `disturbed_torchrun`."""
    (folder / "small.yaml").write_text("")
    given = [folder / "small.yaml", f"run.dir={folder}", *SMALL, *LONG, *overrides]
    return disturbed_torchrun(folder, disturbances, given, ranks, restarts, **options)


def train(*arguments, **options):
    """The same, to its end."""
    return ended(start(*arguments, **options), HANG)


def at(step, rank, action, *arguments, times=1):
    """What happens to a rank before a step, in its first starts."""
    return rank, range(times), partial(at_step, step, action, *arguments)


def went_on(done, folder, undisturbed, *steps):
    """Whether it ended well, each time continued after one of these steps."""
    assert done.returncode == 0, done.stderr
    continued = [int(step) for step in re.findall(r"continuing after step (\d+) from", done.stdout)]
    assert len(continued) == len(steps), done.stdout
    assert all(map(list.__contains__, steps, continued)), done.stdout
    same_end(folder / "small", undisturbed)


@pytest.mark.wide
def test_workers_that_sleep_or_are_killed_are_replaced(tmp_path, undisturbed):
    """One sleeps, then that of rank 0 is killed, which holds the lock and writes all files."""
    # A run that is to be replaced, which a restart must not do once more.
    (tmp_path / "small").mkdir()
    (tmp_path / "small/config.yaml").write_text("")
    kill = at(14, 0, signal.raise_signal, signal.SIGKILL, times=2)
    faults = [at(6, 1, sleep_in_python), kill]
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
    with start(tmp_path, [at(3, 0, slow_down)], restarts=0, seconds=None) as process:
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
    same_end(tmp_path / "small", undisturbed(2))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [(), ("--standalone",), ("--master_port", "29617")])
def test_every_rendezvous_forgets_the_killed(tmp_path, undisturbed, ranks, options):
    kill = at(14, ranks - 1, signal.raise_signal, signal.SIGKILL)
    done = train(tmp_path, [kill], ranks=ranks, options=options)
    went_on(done, tmp_path, undisturbed(ranks), [12, 9])


@pytest.mark.soak
@pytest.mark.parametrize("ranks, rank", [(2, 1), (2, 0), (4, 2)])
def test_a_stopped_worker_is_named_and_replaced(tmp_path, undisturbed, ranks, rank):
    stop = at(10, rank, signal.raise_signal, signal.SIGSTOP)
    done = train(tmp_path, [stop], f"run.hang_seconds={PATIENCE}", ranks=ranks)
    assert f"the run hangs: rank {rank} is stopped, dead or out of reach, " in done.stderr
    assert "the others wait at step 10, " in done.stderr
    assert done.stderr.count("the run hangs") == 1
    went_on(done, tmp_path, undisturbed(ranks), [9, 8])
