"""Time by phase from the beats of the pulse, with a clock that a test sets."""

import threading

import pytest
import torch
import torch.distributed as dist

from stampede.engine.monitor import PhaseTimes, waits_counted
from stampede.engine.pulse import PHASES, Pulse


class SetClock:
    """A clock that is set; as a GPU's, its marks are known only once it gets there."""

    def __init__(self):
        self.now, self.reached, self.waits = 0.0, float("inf"), 0

    def mark(self):
        return self.now

    def seconds(self, first, last):
        assert last <= self.reached
        return last - first

    def is_settled(self, mark):
        return mark <= self.reached

    def settle(self, mark):
        self.waits += 1
        self.reached = max(self.reached, mark)


STEP = [("reading the next batch", 1.0), ("sending ids", 2.0), ("between steps", 0.5),
        ("looking up", 4.0), ("computing", 8.0)]  # fmt: skip


def take_step(pulse, clock, stages=STEP):
    for stage, seconds in stages:
        pulse.beat(stage)
        clock.now += seconds


@pytest.fixture
def watched():
    clock, pulse = SetClock(), Pulse()
    times = PhaseTimes(clock)
    with pulse.listening(times.begin):
        yield clock, pulse, times


def test_phases_are_the_whole_step(watched):
    clock, pulse, times = watched
    clock.now = 100.0
    for _ in range(3):
        take_step(pulse, clock)
        times.end_step()
    found = times.take()
    assert [step.seconds for step in found] == [15.5] * 3
    assert found[1].phases == dict(STEP)
    # What was before the first stage of training is no part of a step.
    assert found[0].outside == {"starting": 100.0} and found[1].outside == {}
    assert times.take() == []


def test_evaluations_and_saves_are_outside(watched):
    clock, pulse, times = watched
    take_step(pulse, clock)
    times.end_step()
    clock.now += 3.0
    take_step(pulse, clock, [("evaluating", 10.0), ("evaluating", 10.0)])
    with pulse.slowly("saving"):
        clock.now += 7.0
    clock.now += 1.0
    take_step(pulse, clock)
    times.end_step()
    last = times.take()[1]
    assert last.seconds == 15.5 + 3.0
    assert last.outside == {"evaluating": 20.0, "saving": 7.0, "going on after saving": 1.0}


def test_an_evaluation_of_many_batches_takes_no_memory(watched):
    clock, pulse, times = watched
    take_step(pulse, clock, [("evaluating", 1.0)] * 1000)
    assert len(times._step.stages) == 2


def test_a_gpu_is_waited_for_at_the_end_of_a_window_only(watched):
    clock, pulse, times = watched
    clock.reached = 0.0
    for _ in range(100):
        take_step(pulse, clock)
        times.end_step()
    assert clock.waits == 0
    # Half of the steps are done on the GPU: their marks are let go of.
    clock.reached = clock.now / 2
    times.end_step()
    assert len(times._ended) == pytest.approx(51, abs=1)
    assert len(times.take()) == 101 and clock.waits == 1


def test_all_of_an_exchange_that_runs_on_the_stream_is_waiting():
    clock, pulse = SetClock(), Pulse()
    times = PhaseTimes(clock, exchanges=["adding up the loss"])
    with pulse.listening(times.begin):
        take_step(pulse, clock, [("computing", 1.0), ("adding up the loss", 4.0)])
        times.waited(times.mark())
        times.end_step()
    assert times.take()[0].waited == 4.0


def test_waits_of_this_thread_count_within_a_step(watched, monkeypatch):
    clock, pulse, times = watched

    class Work:
        def wait(self):
            clock.now += 3.0
            return "waited"

    before = Work.wait
    monkeypatch.setattr(dist, "Work", Work)
    with waits_counted(times):
        pulse.beat("evaluating")
        assert Work().wait() == "waited"
        pulse.beat("computing")
        clock.now += 1.0
        assert Work().wait() == "waited"
        # That of a checkpoint's writer.
        writer = threading.Thread(target=lambda: Work().wait())
        writer.start()
        writer.join()
        times.end_step()
    assert Work.wait is before
    found = times.take()[0]
    assert found.waited == 3.0 and found.seconds == 7.0


def test_real_collectives_are_waited_for():
    """Also those that autograd starts."""
    clock, pulse = SetClock(), Pulse()
    times = PhaseTimes(clock)
    before = dist.Work.wait
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pulse.listening(times.begin), waits_counted(times):
            pulse.beat("computing")
            dist.all_reduce(torch.ones(3))
            assert len(times._step.waits) == 1
    finally:
        dist.destroy_process_group()
    assert dist.Work.wait is before


def test_the_phases_are_those_that_a_step_beats():
    assert len(set(PHASES)) == len(PHASES) == 10
