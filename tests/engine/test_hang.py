"""What becomes of processes that hang, and which rank is named."""

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from stampede.engine.config import RunSection
from stampede.engine.errors import exit_status
from stampede.engine.hang import (
    RankStatus,
    Seen,
    Watchdog,
    place_of,
    stuck_ranks,
    watched,
    what_happens_now,
)
from stampede.engine.processes import Processes, processes
from support.forked import START_METHOD
from support.jobs import run_small
from support.waiting import HANG, wait_for


def sleep_well():
    time.sleep(36000)


def hang(folder, slowly):
    """Take three steps, then hang; status and output go where the test finds them."""
    settings = RunSection(hang_seconds=3.0, slow_hang_seconds=4.0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    with processes("cpu") as here, watched(here, settings, folder):
        for step in range(1, 4):
            here.heartbeat.beat("computing", step)
            time.sleep(0.3)
        print("three steps done")
        if slowly:
            with here.heartbeat.slowly("saving"):
                sleep_well()
        here.heartbeat.beat("saving")
        sleep_well()


@pytest.mark.slow
@pytest.mark.parametrize(
    "slowly, limit", [(False, "run.hang_seconds=3"), (True, "run.slow_hang_seconds=4")]
)
def test_the_only_process_ends_itself(tmp_path, slowly, limit):
    process = forked(hang, tmp_path, slowly)
    process.join(HANG)
    assert process.exitcode == 3
    # What the process had printed is not lost.
    assert "three steps done" in (tmp_path / "stdout").read_text()
    said = (tmp_path / "stderr").read_text()
    assert "error: the run hangs: rank 0 makes no progress: at step 3, saving, for " in said
    assert f"After {limit} its processes end with status 3; checkpoint.res" in said
    assert "in sleep_well" in (tmp_path / "hang_rank_0.txt").read_text()


def forked(function, *arguments):
    process = multiprocessing.get_context(START_METHOD).Process(target=function, args=arguments)
    process.start()
    return process


@pytest.mark.slow
def test_a_run_that_goes_on_is_left_alone(tmp_path):
    """Steps are shorter than the patience, all of them together are not."""
    run_small(tmp_path, ["run.hang_seconds=3", "train.epochs=3"])
    assert not list((tmp_path / "small").glob("hang*"))
    assert "stampede-watchdog" not in [thread.name for thread in threading.enumerate()]


def test_0_seconds_watch_nothing():
    with processes("cpu") as here, watched(here, RunSection(hang_seconds=0.0), None):
        assert "stampede-watchdog" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_time_counts_from_the_first_beat_on(tmp_path):
    with processes("cpu") as here:
        here.heartbeat.beat("an earlier run in this process")
        watchdog = Watchdog(here, RunSection(hang_seconds=8.0), tmp_path, None)
        try:
            time.sleep(1)
            assert not watchdog._still
            here.heartbeat.beat("computing", 1)
            assert wait_for(lambda: watchdog._still)
            # Kernels may be compiled in the first step.
            assert watchdog._left() > 600
            here.heartbeat.beat("computing", 2)
            assert wait_for(lambda: watchdog._left() < 8)
        finally:
            watchdog.close()


@pytest.mark.parametrize("begun", [[("evaluating", None), ("computing", 7)], [("computing", 7)]])
def test_only_the_first_step_may_take_longer(tmp_path, begun):
    """Also where the thread sees a later one first."""
    with processes("cpu") as here:
        watchdog = Watchdog(here, RunSection(hang_seconds=8.0), tmp_path, None)
        try:
            for stage, step in begun:
                here.heartbeat.beat(stage, step)
            here.heartbeat.beat("computing", 8)
            assert wait_for(lambda: watchdog._left() <= 8)
        finally:
            watchdog.close()


def test_a_slow_stage_has_a_time_of_its_own(tmp_path):
    settings = RunSection(hang_seconds=8.0, slow_hang_seconds=300.0)
    with processes("cpu") as here:
        watchdog = Watchdog(here, settings, tmp_path, None)
        try:
            for step in (1, 2):
                here.heartbeat.beat("computing", step)
            assert wait_for(lambda: watchdog._left() <= 8)
            with here.heartbeat.slowly("saving"):
                assert wait_for(lambda: 8 < watchdog._left() <= 300)
            assert wait_for(lambda: watchdog._left() <= 8)
        finally:
            watchdog.close()


def take_steps(folder):
    with processes("cpu") as here, watched(here, RunSection(hang_seconds=3.0), folder):
        for step in range(1, 5):
            here.heartbeat.beat("computing", step)
            (folder / str(step)).touch()
            # While the process is stopped none of these ends.
            for _ in range(12):
                time.sleep(0.1)


@pytest.mark.slow
def test_a_process_that_was_stopped_for_a_while_goes_on(tmp_path):
    process = forked(take_steps, tmp_path)
    assert wait_for(lambda: not process.is_alive() or (tmp_path / "2").exists())
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(process.pid, signal.SIGCONT)
    process.join(HANG)
    assert process.exitcode == 0


def test_what_happens_now(monkeypatch):
    assert what_happens_now(3).endswith(
        "checkpoint.resume=auto continues from the newest checkpoint"
    )
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert "torchrun starts them again from the newest checkpoint (restart 2 of 2)" in (
        what_happens_now(3)
    )
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert "torchrun" not in what_happens_now(3)


LOST = (
    "[/src/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:5: Connection reset by peer. "
    "This is typically caused by a remote worker hanging"
)


def test_a_rank_that_is_gone_is_no_traceback_of_the_others(capsys, monkeypatch):
    def fail(message):
        raise RuntimeError(message)

    monkeypatch.setenv("RANK", "1")
    assert exit_status(lambda: fail(LOST)) == 1
    said = capsys.readouterr().err
    assert said.startswith("error on rank 1: the connection to another rank is lost (Read error ")
    assert "Connection reset by peer); read that rank's output" in said
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        exit_status(lambda: fail("a mistake of ours"))


AHEAD = RankStatus(9, beats=31, step=5, stage="adding up the loss", still_seconds=60.0, hangs=True)


BEHIND = replace(AHEAD, beats=30, stage="computing", place="engine/step.py:9 in f")


@pytest.mark.parametrize(
    "ranks, said",
    [
        ([AHEAD, BEHIND], "rank 1 makes no progress: at step 5, computing, for 60 s (engine"),
        ([replace(BEHIND, waits=True), BEHIND, AHEAD], "rank 1 makes no progress"),
        ([BEHIND, AHEAD, BEHIND], "ranks 0 and 2 make no progress: rank 0 at step 5, comp"),
        ([replace(AHEAD, waits=True)] * 2, "ranks 0 and 1 make no progress"),
        ([AHEAD, None], "rank 1 is stopped, dead or out of reach: never heard of; the others "
         "wait at step 5, adding up the loss"),
        ([AHEAD, replace(BEHIND, ended=True, hangs=False)], "rank 1 has left the training: at "
         "step 5, computing; the others wait at step 5, adding"),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_wait_for(ranks, said):
    found = stuck_ranks({rank: Seen(status) for rank, status in enumerate(ranks)})
    assert found.startswith(said)


def test_a_silent_rank_is_it_whatever_it_said_last():
    late = replace(AHEAD, beats=99, hangs=False)
    found = stuck_ranks({0: Seen(AHEAD), 1: Seen(late, silent=True), 2: Seen(BEHIND)})
    assert found.startswith("rank 1 is stopped, dead or out of reach: last heard of at step 5")
    assert found.endswith("the others wait at step 5, computing")


def test_nobody_hangs_while_a_rank_moves():
    assert stuck_ranks({0: Seen(AHEAD), 1: Seen(replace(BEHIND, hangs=False))}) == ""


def test_nobody_waits_once_the_training_has_ended():
    ended = replace(AHEAD, ended=True)
    assert stuck_ranks({0: Seen(ended), 1: Seen(None), 2: Seen(ended)}) == ""


def test_many_ranks_are_not_all_named():
    reason = stuck_ranks({rank: Seen(BEHIND) for rank in range(20)})
    assert reason.startswith(
        "ranks 0, 1, 2, 3, 4, 5, 6 and 7; and 12 more make no progress: rank 0 at"
    )
    assert "rank 8" not in reason


def test_a_place_in_the_project_and_who_waits_there():
    woken = threading.Event()

    def sleep():
        woken.wait(HANG)

    thread = threading.Thread(target=sleep)
    thread.start()
    try:
        place, waits = _settled(thread)
    finally:
        woken.set()
        thread.join()
    # The innermost frame is in a library, which waits for nobody elsewhere.
    assert "in sleep" in place and "test_hang.py" in place and not waits
    assert place_of(-1) == ("", False)


def _settled(thread):
    deadline = time.monotonic() + HANG
    while "in sleep" not in (found := place_of(thread.ident))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def of_two(rank):
    return Processes(rank, 2, 2, torch.device("cpu"))


def test_ranks_tell_each_other_where_they_are(tmp_path):
    store, ranks = dist.HashStore(), [of_two(rank) for rank in range(2)]
    # Rounds of a fiftieth of a second; in the first step nobody hangs.
    settings = RunSection(hang_seconds=0.4)
    watchdogs = [Watchdog(here, settings, tmp_path, store) for here in ranks]

    def seen():
        watchdogs[0]._read_others()
        return watchdogs[0]._seen[1]

    try:
        ranks[1].heartbeat.beat("computing", 7)
        assert wait_for(lambda: seen()[0].step == 7)
        watchdogs[1].close()
        assert wait_for(lambda: seen()[0].ended)
        number = seen()[0].published
        for _ in range(20):
            status, new_in = seen()
        assert status.published == number and watchdogs[0]._rounds - new_in > 20
    finally:
        for watchdog in watchdogs:
            watchdog.close()


def test_a_store_that_does_not_answer_is_told(tmp_path):
    class Gone:
        def set(self, key, value):
            raise RuntimeError("no answer")

        def check(self, keys):
            raise RuntimeError("no answer")

    watchdog = Watchdog(of_two(0), RunSection(hang_seconds=20.0), tmp_path, Gone())
    watchdog.close()
    watchdog._is_first_step = False
    watchdog._still = 21.0
    assert watchdog._judge() == ""
    watchdog._still = 100.0
    assert "the store of the process group does not answer" in watchdog._judge()
