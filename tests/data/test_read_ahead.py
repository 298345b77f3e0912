"""Threads that read ahead of their consumer, and threads that share a task."""

import gc
import multiprocessing
import threading
import time

import pytest
import torch

from stampede.data import DataError, GlobalBatches, Samples
from stampede.data import parallel as helpers
from stampede.data.parallel import run_tasks
from support.batches import numbered, reader
from support.threads import torch_threads
from support.waiting import HANG


@pytest.fixture
def two_threads():
    with torch_threads(2):
        yield


def readers_running():
    gc.collect()
    return [thread for thread in threading.enumerate() if "stampede-ahead" in thread.name]


class _Broken:
    """Fails at a row, with an error of its own."""

    rows, device = 64, torch.device("cpu")

    def read(self, rows):
        if 40 in rows.tolist():
            raise DataError("row 40 is lost")
        return Samples(rows[:, None], torch.zeros(len(rows), 1), rows % 2)

    def weight(self, rows):
        return None


@pytest.mark.parametrize("ahead", [0, 3])
def test_errors_of_reading_reach_the_consumer_as_they_are(ahead):
    loader = GlobalBatches(_Broken(), ["C1"], 8, 0, 1, ahead=ahead)
    seen = []
    with pytest.raises(DataError, match=r"^row 40 is lost$"):
        for batch in loader:
            seen.append(batch)
    assert len(seen) == 5
    assert loader.state_dict()["samples"] == 40
    assert not readers_running()


def test_no_thread_outlives_its_use():
    loader = reader(numbered(80), ahead=2)
    for _ in loader:
        assert len(readers_running()) == 1
        break
    assert not readers_running()
    assert len(list(loader.epoch(0))) == 10 and not readers_running()


def meet():
    """Two tasks that wait for each other: they end only in two threads."""
    barrier = threading.Barrier(2)
    run_tasks(lambda _: barrier.wait(timeout=HANG), range(2))


@pytest.mark.parametrize("where", ["helper", "caller"])
def test_errors_of_tasks_end_them_all(two_threads, where):
    barrier = threading.Barrier(2)
    done = []

    def task(number):
        if number < 2:
            barrier.wait(timeout=HANG)
            if (threading.current_thread() is threading.main_thread()) == (where == "caller"):
                raise DataError("a shard is lost")
            time.sleep(0.05)
        done.append(number)

    with pytest.raises(DataError, match=r"^a shard is lost$"):
        run_tasks(task, range(100))
    assert len(done) < 99
    # No task is still running.
    after = list(done)
    time.sleep(0.1)
    assert done == after


def test_busy_helpers_are_not_waited_for(two_threads):
    release = threading.Event()
    busy = [helpers._helpers().submit(release.wait, HANG) for _ in range(helpers._MOST_CORES)]
    done = []
    try:
        run_tasks(done.append, range(4))
        assert not any(future.done() for future in busy)
    finally:
        release.set()
    assert done == [0, 1, 2, 3]


def test_a_fork_has_helpers_of_its_own(two_threads):
    meet()
    child = multiprocessing.get_context("fork").Process(target=meet, daemon=True)
    child.start()
    child.join(HANG)
    code = child.exitcode
    child.kill()
    assert code == 0
