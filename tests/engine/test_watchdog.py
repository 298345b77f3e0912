"""Who hangs, where, and what becomes of the processes."""

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from stampede.engine import restarts
from stampede.engine.config import load_config
from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.exit_status import exit_status
from stampede.engine.processes import processes
from stampede.engine.pulse import Pulse
from stampede.engine.rendezvous import agree_on_name
from stampede.engine.run_folder import RunFolder
from stampede.engine.watchdog.board import Board
from stampede.engine.watchdog.last_words import what_happens_now
from stampede.engine.watchdog.standing import Standing, place_of
from stampede.engine.watchdog.verdict import Seen, find_culprits
from stampede.engine.watchdog.watchdog import Watchdog, watched
from support.jobs import run_small
from support.paths import ROOT

AHEAD = Standing(9, beats=31, step=5, stage="adding up the loss", still_seconds=60.0, hangs=True)
BEHIND = replace(AHEAD, beats=30, stage="computing", place="engine/step.py:9 in f")


@pytest.mark.parametrize(
    "ranks, culprits, said",
    [
        ([AHEAD, BEHIND], [1], "rank 1 does not go on: at step 5, computing, for 60 s (engine"),
        ([replace(BEHIND, waits=True), BEHIND, AHEAD], [1], "rank 1 does not go on"),
        ([BEHIND, AHEAD, BEHIND], [0, 2], "ranks 0 and 2 do not go on: rank 0 at step 5, comp"),
        ([replace(AHEAD, waits=True)] * 2, [0, 1], "ranks 0 and 1 do not go on"),
        ([AHEAD, None], [1], "rank 1 is stopped, dead or out of reach: never heard of; the others "
         "wait at step 5, adding up the loss"),
        ([AHEAD, replace(BEHIND, ended=True, hangs=False)], [1], "rank 1 has left the training: at "
         "step 5, computing; the others wait at step 5, adding"),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_wait_for(ranks, culprits, said):
    verdict = find_culprits({rank: Seen(standing) for rank, standing in enumerate(ranks)})
    assert verdict.ranks == culprits and verdict.reason.startswith(said)


def test_a_silent_rank_is_it_whatever_it_said_last():
    late = replace(AHEAD, beats=99, hangs=False)
    verdict = find_culprits({0: Seen(AHEAD), 1: Seen(late, silent=True), 2: Seen(BEHIND)})
    assert verdict.ranks == [1]
    assert "stopped, dead or out of reach: last heard of at step 5" in verdict.reason
    assert verdict.reason.endswith("the others wait at step 5, computing")


def test_nobody_hangs_while_a_rank_moves():
    assert find_culprits({0: Seen(AHEAD), 1: Seen(replace(BEHIND, hangs=False))}) is None


def test_nobody_waits_once_the_training_has_ended():
    ended = replace(AHEAD, ended=True)
    assert find_culprits({0: Seen(ended), 1: Seen(None), 2: Seen(ended)}) is None


def test_many_ranks_are_not_all_named():
    reason = find_culprits({rank: Seen(BEHIND) for rank in range(20)}).reason
    assert reason.startswith("ranks 0, 1, 2, 3, 4, 5, 6 and 7; and 12 more do not go on: rank 0 at")
    assert "rank 8" not in reason


def test_a_place_in_the_project_and_who_waits_there():
    woken = threading.Event()

    def sleep():
        woken.wait(60)

    thread = threading.Thread(target=sleep)
    thread.start()
    try:
        place, waits = _settled(thread)
    finally:
        woken.set()
        thread.join()
    # The innermost frame is in a library, which waits for nobody elsewhere.
    assert "in sleep" in place and "test_watchdog.py" in place and not waits
    assert place_of(-1) == ("", False)


def _settled(thread):
    deadline = time.monotonic() + 20
    while "in sleep" not in (found := place_of(thread.ident))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_standings_on_the_board():
    store, pulses = dist.HashStore(), [Pulse(), Pulse()]
    published = [0, 0]

    def standing_of(rank):
        def standing():
            published[rank] += 1
            return Standing(published[rank], pulses[rank].beats, pulses[rank].step, "computing")

        return standing

    boards = [Board(store, rank, 2, 0.02, standing_of(rank)) for rank in range(2)]
    try:
        pulses[1].beat("computing", 7)
        boards[0].read(True)
        seen = _wait_for(boards[0].others)
        assert seen[1].standing.step == 7 and not seen[1].silent
        assert [board.is_first() for board in boards] == [True, False]
        boards[1].close()
        assert _wait_for(lambda: boards[0].others()[1].silent)
    finally:
        for board in boards:
            board.close()


def _wait_for(found, seconds=20):
    deadline = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return value


def test_a_store_that_does_not_answer_keeps_nobody_waiting():
    released = threading.Event()

    class Gone:
        sets = 0

        def set(self, key, value):
            self.sets += 1
            if self.sets > 1:
                released.wait(60)

    board = Board(Gone(), 0, 2, 0.02, lambda: AHEAD)
    try:
        board.read(True)
        assert board.is_first()
        assert board.others() is None
    finally:
        released.set()
        board.close()


HANGS = """
import sys, time
from pathlib import Path
from stampede.engine.processes import processes
from stampede.engine.watchdog.watchdog import watched

def sleep_well():
    time.sleep(60)

with processes("cpu") as here, watched(here, 1.0, Path(sys.argv[1])):
    for step in range(1, 4):
        here.pulse.beat("computing", step)
        time.sleep(0.6)
    print("three steps done")
    here.pulse.beat("saving")
    sleep_well()
"""


def test_the_only_process_ends_itself(tmp_path):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, timeout=100,
    )  # fmt: skip
    assert time.monotonic() - start < 50
    assert done.returncode == 3
    # What the process had printed is not lost.
    assert "three steps done" in done.stdout
    assert "error: the run hangs: rank 0 does not go on: at step 3, saving, for 1" in done.stderr
    assert "After run.hang_seconds=1 its processes end with status 3; checkpoint.res" in done.stderr
    assert "in sleep_well" in (tmp_path / "hang_rank_0.txt").read_text()


def test_a_run_that_goes_on_is_left_alone(tmp_path):
    """Steps are shorter than the patience, all of them together are not."""
    run_small(tmp_path, ["run.hang_seconds=3", "train.epochs=3"])
    assert not list((tmp_path / "small").glob("hang*"))
    assert not [
        t for t in threading.enumerate() if t.name in ("stampede-board", "stampede-watchdog")
    ]


def test_0_seconds_watch_nothing():
    with processes("cpu") as here, watched(here, 0.0, None):
        assert not [
            t for t in threading.enumerate() if t.name in ("stampede-board", "stampede-watchdog")
        ]


def test_time_counts_from_the_first_beat_on(tmp_path):
    with processes("cpu") as here:
        here.pulse.beat("an earlier run in this process")
        watchdog = Watchdog(here, 20.0, tmp_path, None)
        try:
            time.sleep(2.5)
            assert not watchdog._still
            here.pulse.beat("computing", 1)
            assert _wait_for(lambda: watchdog._still)
            # Kernels may be compiled in the first step.
            assert watchdog._left() > 600
            here.pulse.beat("computing", 2)
            assert _wait_for(lambda: watchdog._left() < 20)
        finally:
            watchdog.close()


@pytest.mark.parametrize("begun", [[("evaluating", None), ("computing", 7)], [("computing", 7)]])
def test_only_the_first_step_may_take_longer(tmp_path, begun):
    """Also where the thread sees a later one first."""
    with processes("cpu") as here:
        watchdog = Watchdog(here, 20.0, tmp_path, None)
        try:
            for stage, step in begun:
                here.pulse.beat(stage, step)
            here.pulse.beat("computing", 8)
            assert _wait_for(lambda: watchdog._left() <= 20)
        finally:
            watchdog.close()


STEPS = """
import sys, time
from pathlib import Path
from stampede.engine.processes import processes
from stampede.engine.watchdog.watchdog import watched

with processes("cpu") as here, watched(here, 3.0, Path(sys.argv[1])):
    for step in range(1, 6):
        here.pulse.beat("computing", step)
        print(step, flush=True)
        # While the process is stopped none of these ends.
        for _ in range(12):
            time.sleep(0.1)
"""


def test_a_process_that_was_stopped_for_a_while_goes_on(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", STEPS, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        while process.stdout.readline() != "2\n":
            assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.stdout.close()


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


def joined(store, ranks, names):
    threads = [
        threading.Thread(target=lambda r=r: names.append(agree_on_name(store, r, 3, 20)))
        for r in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def test_a_start_has_a_name_that_no_other_start_has_had():
    """The store keeps what processes have written that are gone, some before they had joined."""
    store, names = dist.HashStore(), []
    for other in (1, 2):
        store.set(f"stampede/rendezvous/hello/{other}", "of a process that is gone")
    joined(store, [1, 0, 2], names)
    assert len(names) == 3 and len(set(names)) == 1
    joined(store, [0, 1, 2], names)
    assert len(names) == 6 and len(set(names)) == 2


def test_processes_that_do_not_join_are_named():
    with pytest.raises(TrainingStoppedError, match="of 3 processes ranks 1, 2 have not joined"):
        agree_on_name(dist.HashStore(), 0, 3, 0.05)


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
    assert "Connection reset by peer); see what that rank says" in said
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        exit_status(lambda: fail("a mistake of ours"))


def small(tmp_path, *overrides):
    path = tmp_path / "small.yaml"
    path.write_text("")
    return load_config(path, [f"run.dir={tmp_path}", *overrides])


@pytest.mark.parametrize("overrides", [[], ["run.overwrite=true"]])
def test_a_restart_continues_what_the_same_torchrun_began(tmp_path, monkeypatch, overrides):
    config = small(tmp_path, *overrides)

    def start(torchrun, attempt):
        name = f"{tmp_path}/torchelastic_{torchrun}/none_{torchrun}/attempt_{attempt}/0/error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", name)
        with RunFolder(tmp_path / "small") as folder:
            continued = folder.reserve(config)
            folder.claim(config)
            return continued

    # Another run is there, whose torchrun is gone.
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    with RunFolder(tmp_path / "small") as folder:
        folder.reserve(small(tmp_path))
        folder.claim(small(tmp_path))
    (tmp_path / "small/checkpoints/epoch_0001").mkdir()
    if overrides:
        assert not start("a", 0)
        assert not list((tmp_path / "small/checkpoints").iterdir())
        (tmp_path / "small/checkpoints/epoch_0001").mkdir()
        assert start("a", 1)
        assert list((tmp_path / "small/checkpoints").iterdir())
        assert not start("b", 0)
        assert not list((tmp_path / "small/checkpoints").iterdir())
    else:
        # A mistake remains one, however often torchrun starts again.
        for attempt in range(2):
            with pytest.raises(RunFolderError, match="exists; write"):
                start("a", attempt)


def test_restarts_are_counted(monkeypatch):
    assert restarts.restarts() == (0, 0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert restarts.restarts() == (1, 3)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert restarts.launched_by() is None
