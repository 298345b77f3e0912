"""Processes that hang end themselves and name the stuck rank."""

import itertools
import json
import multiprocessing
import os
import socket
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from stampede.engine.config import RunSection
from stampede.engine.exit_status import exit_status
from stampede.engine.processes import STORE_FILE, Processes, connection, processes
from stampede.engine.watching import hang
from stampede.engine.watching.hang import (
    RankStatus,
    Watchdog,
    lost_ranks,
    stuck_ranks,
    waits_for_others,
    watched,
)
from support.forked import START_METHOD
from support.waiting import HANG, wait_for


def hang_when_saving(folder):
    """Take three steps, then hang; status and output go where the test finds them."""
    settings = RunSection(hang_seconds=3.0, slow_hang_seconds=4.0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    with processes("cpu") as here, watched(here, settings, folder):
        for step in range(1, 4):
            here.heartbeat.beat("computing", step)
            time.sleep(0.3)
        print("three steps done")
        with here.heartbeat.slowly("saving"):
            time.sleep(36000)


@pytest.mark.slow
def test_the_only_process_ends_itself(tmp_path):
    context = multiprocessing.get_context(START_METHOD)
    process = context.Process(target=hang_when_saving, args=(tmp_path,))
    process.start()
    process.join(HANG)
    assert process.exitcode == 3
    # What the process had printed is not lost.
    assert "three steps done" in (tmp_path / "stdout").read_text()
    said = (tmp_path / "stderr").read_text()
    assert "error: the run hangs: rank 0 makes no progress: at step 3, saving, for " in said
    assert "After run.slow_hang_seconds=4 its processes end with status 3; a restart by" in said
    assert "in hang_when_saving" in (tmp_path / "hang_rank_0.txt").read_text()


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_thread_watches_unless_the_patience_is_0(tmp_path, seconds):
    def watching():
        return "stampede-watchdog" in [thread.name for thread in threading.enumerate()]

    with processes("cpu") as here, watched(here, RunSection(hang_seconds=seconds), tmp_path):
        assert watching() == (seconds > 0)
    assert not watching()


class Proxy:
    """Passes on what is sent to a port, until it is frozen: then nothing arrives any more.

    The connections stay open, as when a cable is cut.
    """

    def __init__(self, to):
        self._to, self._is_frozen = to, False
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._start(self._accept)

    def freeze(self):
        self._is_frozen = True

    def _start(self, action, *arguments):
        threading.Thread(target=action, args=arguments, daemon=True).start()

    def _accept(self):
        while True:
            near, _ = self._server.accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            self._start(self._pass_on, near, far)
            self._start(self._pass_on, far, near)

    def _pass_on(self, source, sink):
        while content := source.recv(1 << 16):
            if not self._is_frozen:
                sink.sendall(content)


def wait_for_a_lost_host(folder, port):
    """A rank whose other host is gone, with the store; output goes where the test finds it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.pop(STORE_FILE, None)
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    here = Processes(1, 2, 1, torch.device("cpu"), hosts=("north", "south"))
    watchdog = Watchdog(here, RunSection(hang_seconds=4.0), folder, connection())
    here.heartbeat.beat("computing", 1)
    # The other rank is as far.
    watchdog._store.set("0", json.dumps(asdict(RankStatus(1, 1, "computing", published=1))))
    assert wait_for(lambda: watchdog._statuses)
    with here.heartbeat.slowly("saving"):
        (folder / "waits").touch()
        time.sleep(36000)


@pytest.mark.wide
def test_a_store_that_never_answers_holds_nobody_up(tmp_path):
    """Not even in a save, which may take a day: a process that is there would say so."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proxy = Proxy(server.port)
    context = multiprocessing.get_context(START_METHOD)
    process = context.Process(target=wait_for_a_lost_host, args=(tmp_path, proxy.port))
    process.start()
    assert wait_for((tmp_path / "waits").exists)
    proxy.freeze()
    process.join(HANG)
    assert process.exitcode == 3
    said = (tmp_path / "stderr").read_text()
    assert "error: the run hangs: rank 1 on south waits at step 1, saving for north, and " in said
    assert "torchrun's store at 127.0.0.1, where it would hear of the other ranks, does not" in said
    assert "After run.hang_seconds=4 its processes end with status 3" in said
    assert "in wait_for_a_lost_host" in (tmp_path / "hang_rank_1.txt").read_text()


def of_two(rank):
    return Processes(rank, 2, 2, torch.device("cpu"))


@pytest.mark.parametrize("slow, limit", [(300.0, 300.0), (2.0, 8.0)])
def test_the_first_step_and_slow_stages_may_take_longer(tmp_path, slow, limit):
    here = of_two(0)
    heartbeat = here.heartbeat
    heartbeat.beat("an earlier run in this process")
    settings = RunSection(hang_seconds=8.0, slow_hang_seconds=slow)
    watchdog = Watchdog(here, settings, tmp_path, dist.HashStore())
    watchdog.close()

    def left_after(seconds):
        # The first call sees the newest beat.
        watchdog._count(0.0)
        watchdog._count(seconds)
        return watchdog._left()

    # Time counts from the first beat on.
    assert left_after(100.0) == 608.0
    # Kernels may be compiled in it, and in an evaluation before it.
    heartbeat.beat("evaluating")
    assert left_after(5.0) == 603.0
    heartbeat.beat("computing", 7)
    assert left_after(5.0) == 603.0
    heartbeat.beat("computing", 8)
    assert left_after(5.0) == 3.0
    with heartbeat.slowly("saving"):
        assert left_after(1.0) == limit - 1.0
    assert left_after(1.0) == 7.0


def test_time_while_the_process_was_stopped_does_not_count(tmp_path, monkeypatch):
    # An hour in each round of a fiftieth of a second.
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    here = of_two(0)
    watchdog = Watchdog(here, RunSection(hang_seconds=0.4), tmp_path, dist.HashStore())
    try:
        here.heartbeat.beat("computing", 1)
        assert wait_for(lambda: watchdog._still) and watchdog._still < 60.0
    finally:
        watchdog.close()


def test_a_lost_rank_is_a_sentence_on_the_others(capsys, monkeypatch):
    def fail(message):
        raise RuntimeError(message)

    lost = (
        "[/src/gloo/transport/tcp/pair.cc:537] Read error [::1]:5: Connection reset by peer. This "
        "is typically caused by a remote worker hanging"
    )
    monkeypatch.setenv("RANK", "1")
    assert exit_status(lambda: fail(lost)) == 1
    said = capsys.readouterr().err
    assert said.startswith("error on rank 1: the connection to another rank is lost (Read error ")
    assert "Connection reset by peer); read that rank's output" in said
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        exit_status(lambda: fail("a mistake of ours"))


AHEAD = RankStatus(beats=31, step=5, stage="adding up the loss", still_seconds=60.0, hangs=True)
BEHIND = replace(AHEAD, beats=30, stage="computing")
WAITING = replace(BEHIND, waits=True)
STUCK = "makes no progress: at step 5, computing, for 60 s"
GONE = "is stopped, dead or out of reach, or has left the training"
WAIT = "; the others wait at step 5, "


@pytest.mark.parametrize(
    "ranks, said",
    [
        ([WAITING, BEHIND, AHEAD], f"rank 1 {STUCK}"),
        ([BEHIND, AHEAD, BEHIND], f"rank 0 {STUCK}; rank 2 {STUCK}"),
        ([WAITING] * 2, f"rank 0 {STUCK}; rank 1 {STUCK}"),
        ([AHEAD, replace(BEHIND, hangs=False)], ""),
        ([BEHIND] * 20, "; ".join([*(f"rank {i} {STUCK}" for i in range(8)), "and 12 more"])),
    ],
)
def test_the_rank_that_the_others_wait_for(ranks, said):
    assert stuck_ranks(dict(enumerate(ranks)), "rank {}".format) == said


@pytest.mark.parametrize(
    "ranks, said",
    [
        ([AHEAD], f"rank 1 {GONE}: never heard of{WAIT}adding up the loss"),
        # Whatever it said last.
        ([AHEAD, replace(AHEAD, hangs=False), BEHIND],
         f"rank 1 {GONE}: last heard of at step 5, adding up the loss{WAIT}computing"),
    ],
)  # fmt: skip
def test_the_rank_that_is_lost(ranks, said):
    assert lost_ranks(dict(enumerate(ranks)), {1}, "rank {}".format) == said


def test_ranks_are_named_with_their_hosts_if_there_are_several():
    device = torch.device("cpu")
    assert Processes(0, 2, 1, device, hosts=("north", "south")).named(1) == "rank 1 on south"
    assert Processes(0, 2, 2, device, hosts=("north", "north")).named(1) == "rank 1"


def test_a_thread_waits_for_others_within_a_collective_only():
    ended = threading.Event()
    code, found = "def spin():\n    while not ended.is_set(): pass", {"ended": ended}
    exec(compile(code, "site-packages/torch/distributed/distributed_c10d.py", "exec"), found)
    collective = threading.Thread(target=found["spin"])
    asleep = threading.Thread(target=lambda: ended.wait(HANG))
    for thread in (collective, asleep):
        thread.start()
    try:
        assert wait_for(lambda: waits_for_others(collective.ident))
        assert not waits_for_others(asleep.ident)
    finally:
        ended.set()
        for thread in (collective, asleep):
            thread.join()


def test_ranks_tell_each_other_where_they_are(tmp_path):
    """A rank that says nothing for eight rounds is lost; one that goes on is waited for."""
    store, ranks = dist.HashStore(), [of_two(rank) for rank in range(2)]
    settings = RunSection(hang_seconds=8.0)
    mine, other = (Watchdog(here, settings, tmp_path, store) for here in ranks)
    for watchdog in (mine, other):
        watchdog.close()
    for number, here in enumerate(ranks, 7):
        here.heartbeat.beat("computing", number)
        here.heartbeat.beat("computing", number + 1)

    def judged(publishing, beating=False):
        for watchdog in publishing:
            if watchdog is other and beating:
                other._heartbeat.beat("computing")
            # A round.
            watchdog._count(0.4)
            watchdog._exchange()
        return mine._judge()

    # The first call sees the newest beat.
    judged([mine, other])
    mine._is_first_step = other._is_first_step = False
    for _ in range(60):
        assert judged([other, mine], beating=True) == ""
    assert mine._left() < 0
    said = [judged([mine]) for _ in range(10)]
    assert said[:7] == [""] * 7
    assert said[-1] == (
        "rank 1 is stopped, dead or out of reach, or has left the training: last heard of at step "
        "9, computing; the others wait at step 8, computing"
    )
    judged([other, mine], beating=True)
    assert judged([other, mine], beating=True) == ""


def test_a_rank_that_is_silent_is_lost_also_where_much_time_is_left(tmp_path):
    store, ranks = dist.HashStore(), [of_two(rank) for rank in range(2)]
    mine, other = (Watchdog(here, RunSection(hang_seconds=8.0), tmp_path, store) for here in ranks)
    for watchdog in (mine, other):
        watchdog.close()
        watchdog._heartbeat.beat("computing", 1)
        watchdog._count(0.0)
    with mine._heartbeat.slowly("saving"):
        mine._count(0.0)
        for _ in range(100):
            for watchdog in (other, mine):
                watchdog._count(0.4)
                watchdog._exchange()
            assert mine._judge() == ""
        said = []
        while not (said and said[-1]):
            mine._count(0.4)
            mine._exchange()
            said.append(mine._judge())
    # Eight seconds, and a round until the newest status is read.
    assert 20 <= len(said) <= 22 and "rank 1 is stopped, dead or out of reach" in said[-1]
