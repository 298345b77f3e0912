"""Times of steps by phase and rank, the log of each rank; that watching changes nothing."""

import os
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stampede.engine.errors import InterruptedRunError, TrainingStoppedError
from stampede.engine.heartbeat import PHASES, Heartbeat
from stampede.engine.monitor import (
    PhaseTimes,
    RankLog,
    StepTime,
    log_file,
    sentence_of,
    together,
    waits_counted,
    window_of,
)
from support.full_disk import files_of_at_most
from support.jobs import lines, run_small, without_times
from support.monitored import logged
from support.stopping import ask_to_stop, before_step


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


def take_step(heartbeat, clock, stages=STEP):
    for stage, seconds in stages:
        heartbeat.beat(stage)
        clock.now += seconds


@pytest.fixture
def watched():
    clock, heartbeat = SetClock(), Heartbeat()
    times = PhaseTimes(clock)
    with heartbeat.listening(times.begin):
        yield clock, heartbeat, times


def test_phases_are_the_whole_step(watched):
    clock, heartbeat, times = watched
    clock.now = 100.0
    for _ in range(3):
        take_step(heartbeat, clock)
        times.end_step()
    found = times.take()
    assert [step.seconds for step in found] == [15.5] * 3
    assert found[1].phases == dict(STEP)
    # What was before the first stage of training is no part of a step.
    assert found[0].outside == {"starting": 100.0} and found[1].outside == {}
    assert times.take() == []


def test_evaluations_and_saves_are_outside(watched):
    clock, heartbeat, times = watched
    take_step(heartbeat, clock)
    times.end_step()
    clock.now += 3.0
    take_step(heartbeat, clock, [("evaluating", 10.0), ("evaluating", 10.0)])
    with heartbeat.slowly("saving"):
        clock.now += 7.0
    clock.now += 1.0
    take_step(heartbeat, clock)
    times.end_step()
    last = times.take()[1]
    assert last.seconds == 15.5 + 3.0
    assert last.outside == {"evaluating": 20.0, "saving": 7.0, "continuing after saving": 1.0}


def test_an_evaluation_of_many_batches_takes_no_memory(watched):
    clock, heartbeat, times = watched
    take_step(heartbeat, clock, [("evaluating", 1.0)] * 1000)
    assert len(times._step.stages) == 2


def test_a_gpu_is_waited_for_at_the_end_of_a_window_only(watched):
    clock, heartbeat, times = watched
    clock.reached = 0.0
    for _ in range(100):
        take_step(heartbeat, clock)
        times.end_step()
    assert clock.waits == 0
    # Half of the steps are done on the GPU: their marks are let go of.
    clock.reached = clock.now / 2
    times.end_step()
    assert len(times._ended) == pytest.approx(51, abs=1)
    assert len(times.take()) == 101 and clock.waits == 1


def test_all_of_an_exchange_that_runs_on_the_stream_is_waiting():
    clock, heartbeat = SetClock(), Heartbeat()
    times = PhaseTimes(clock, exchanges=["adding up the loss"])
    with heartbeat.listening(times.begin):
        take_step(heartbeat, clock, [("computing", 1.0), ("adding up the loss", 4.0)])
        times.waited(times.mark())
        times.end_step()
    assert times.take()[0].waited == 4.0


def test_waits_of_this_thread_count_within_a_step(watched, monkeypatch):
    clock, heartbeat, times = watched

    class Work:
        def wait(self):
            clock.now += 3.0
            return "waited"

    before = Work.wait
    monkeypatch.setattr(dist, "Work", Work)
    with waits_counted(times):
        heartbeat.beat("evaluating")
        assert Work().wait() == "waited"
        heartbeat.beat("computing")
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
    clock, heartbeat = SetClock(), Heartbeat()
    times = PhaseTimes(clock)
    before = dist.Work.wait
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with heartbeat.listening(times.begin), waits_counted(times):
            heartbeat.beat("computing")
            dist.all_reduce(torch.ones(3))
            assert len(times._step.waits) == 1
    finally:
        dist.destroy_process_group()
    assert dist.Work.wait is before


def steps_of(computing, waiting=0.0):
    """Steps that read for a tenth of a second, compute and wait in a collective."""
    return [
        StepTime(
            {"reading the next batch": 0.1, "computing": one, "adding up the loss": waiting},
            waited=waiting,
        )
        for one in computing
    ]


def test_percentiles_and_means_of_a_rank():
    computing = np.random.default_rng(0).permutation(np.arange(101.0))
    window = window_of(steps_of(computing, waiting=0.4), 7)
    assert window.percentiles == pytest.approx(
        {"p50": 50.5, "p90": 90.5, "p99": 99.5, "max": 100.5}
    )
    assert window.steps == 101 and window.mean == pytest.approx(50.5)
    assert sum(window.phases.values()) == pytest.approx(window.mean)
    assert window.own == pytest.approx(50.1)
    assert window.fields()["data_share"] == pytest.approx(0.1 / 50.5)
    assert window.fields()["communication_share"] == pytest.approx(0.4 / 50.5)


def test_the_slowest_rank_is_the_one_that_waits_least():
    """Steps of all ranks last equally long, as they wait for each other."""
    windows = [
        window_of(steps_of([1.0], 2.0), 10),
        window_of(steps_of([2.9], 0.1), 30),
        window_of(steps_of([2.0], 1.0), 20),
    ]
    assert len({round(window.mean, 9) for window in windows}) == 1
    found = together(windows)
    assert found["slowest_seconds"] == pytest.approx({"rank": 1, "own": 3.0, "others": 1.6})
    assert found["peak_memory_bytes"] == 30
    assert found["communication_seconds"] == pytest.approx(3.1 / 3)
    assert sum(found["phase_seconds"].values()) == pytest.approx(found["step_seconds"]["mean"])
    # A resumed run is compared without them.
    assert all(name.endswith(("_seconds", "_bytes")) for name in found)


def test_percentiles_of_all_ranks_are_the_worst():
    found = together([window_of(steps_of([1.0, 9.0]), 0), window_of(steps_of([5.0, 5.0]), 0)])
    assert found["step_seconds"]["p50"] == pytest.approx(5.1)
    assert found["step_seconds"]["max"] == pytest.approx(9.1)


def test_the_sentence_for_the_console():
    line = {"step": 1500, **together([window_of(steps_of([0.8], 0.1), 2 * 10**9)])}
    assert sentence_of(line, 1) == (
        "step 1,500: p50 1 s, p90 1 s, p99 1 s, max 1 s; reading 10.0%; memory 2.00 GB"
    )
    windows = [window_of(steps_of([0.2], 0.2), 0), window_of(steps_of([0.4]), 0)]
    assert sentence_of({"step": 3, **together(windows)}, 2) == (
        "step 3: p50 500 ms, p90 500 ms, p99 500 ms, max 500 ms; reading 20.0%; communication "
        "20.0%; slowest rank 1: 500 ms without waiting, the others 300 ms; memory 0 B"
    )


def test_lines_have_time_rank_and_event(tmp_path):
    log = RankLog(tmp_path / "run", 3)
    log.write("timing", step=7, seconds=0.5, share=float("nan"))
    (line,) = logged(tmp_path / "run", 3)
    assert line.pop("time").endswith("+00:00")
    assert line == {"rank": 3, "event": "timing", "step": 7, "seconds": 0.5, "share": None}


def test_a_full_disk_ends_the_log_with_one_sentence(tmp_path, capsys):
    path = log_file(tmp_path, 1)
    log = RankLog(tmp_path, 1)
    with files_of_at_most(0):
        for step in range(3):
            log.write("timing", step=step)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"rank 1: {path}: the log cannot be written (File too large); ")


# 8 steps an epoch.
LONG = ["train.epochs=2", "evaluate.every=3", "train.timing_every=3"]


@pytest.fixture(scope="module")
def timed_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    run_small(folder, LONG)
    return folder / "small"


def timing(run):
    return [line for line in lines(run) if line["kind"] == "timing"]


def of_event(run, event):
    return [line for line in logged(run) if line["event"] == event]


def test_times_are_logged_at_fixed_steps_and_at_an_epochs_end(timed_run):
    found = timing(timed_run)
    assert [line["step"] for line in found] == [3, 6, 8, 9, 12, 15, 16]
    assert [line["step"] for line in of_event(timed_run, "timing")] == [3, 6, 8, 9, 12, 15, 16]
    assert [line["steps"] for line in of_event(timed_run, "timing")] == [3, 3, 2, 1, 3, 3, 1]
    for line in found:
        assert sum(line["phase_seconds"].values()) == pytest.approx(line["step_seconds"]["mean"])
        # All phases take place: those of one process exchange nothing, but are entered.
        assert set(line["phase_seconds"]) == set(PHASES)
        assert line["phase_seconds"]["computing"] > 0 < line["phase_seconds"]["updating tables"]
        assert line["slowest_seconds"]["rank"] == 0 and line["slowest_seconds"]["others"] is None
        assert 1e8 < line["peak_memory_bytes"] < 1e11
        fields = line.keys() - {"kind", "step"}
        assert all(field.endswith(("_seconds", "_bytes")) for field in fields)


def test_times_of_all_steps_are_the_time_of_training(timed_run):
    timed = sum(
        line["steps"] * line["step_seconds"]["mean"] for line in of_event(timed_run, "timing")
    )
    trained = [line["train_seconds"] for line in lines(timed_run) if line["kind"] == "evaluation"][
        -1
    ]
    # Without the rows that are brought up to date in the end; the clocks begin a little apart.
    assert 0.8 * trained < timed < 1.05 * trained


def test_what_is_outside_of_steps(timed_run):
    outside = [set(line["outside_seconds"]) for line in of_event(timed_run, "timing")]
    assert "evaluating" not in outside[0]
    assert {"evaluating", "computing metrics"} <= outside[1]
    assert {"evaluating", "saving"} <= outside[3]


def test_the_log_tells_of_begin_and_end(timed_run):
    first, *_, last = logged(timed_run)
    assert first["event"] == "started" and first["process"] == os.getpid()
    assert (first["rank"], first["world_size"], first["step"]) == (0, 1, 0)
    assert {"torch", "torchrec", "python"} <= first["versions"].keys()
    assert last["event"] == "ended" and last["step"] == 16


def test_tensorboard_has_the_numbers(timed_run):
    board = EventAccumulator(str(timed_run / "tensorboard"))
    board.Reload()
    tags = board.Tags()["scalars"]
    assert {"timing/step_seconds/p99", "timing/slowest_seconds/own", "train/loss"} <= set(tags)
    shown = [(event.step, event.value) for event in board.Scalars("timing/step_seconds/p50")]
    logged_ = [(line["step"], line["step_seconds"]["p50"]) for line in timing(timed_run)]
    assert shown == [(step, pytest.approx(value, rel=1e-6)) for step, value in logged_]


def test_the_console_has_a_sentence_every_n_steps(tmp_path, capsys):
    run_small(tmp_path, ["train.timing_every=4", "train.epochs=2"])
    said = [line for line in capsys.readouterr().out.splitlines() if "; reading " in line]
    assert [line.split(":")[0] for line in said] == ["step 4", "step 8", "step 12", "step 16"]


def test_untimed_runs_compute_the_same(timed_run, tmp_path):
    before = dist.Work.wait
    run_small(tmp_path, [*LONG[:2], "train.timing_every=0"])
    assert dist.Work.wait is before
    assert timing(tmp_path / "small") == []
    assert [line["event"] for line in logged(tmp_path / "small")] == ["started", "ended"]
    assert without_times(tmp_path / "small") == [
        line for line in without_times(timed_run) if line["kind"] != "timing"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("before", [4, 8])
def test_a_resumed_run_has_the_same_lines_and_appends_to_its_log(
    timed_run, tmp_path, monkeypatch, before
):
    with monkeypatch.context() as patch:
        before_step(patch, before, ask_to_stop)
        with pytest.raises(InterruptedRunError):
            run_small(tmp_path, LONG)
    (stop,) = of_event(tmp_path / "small", "stopped")
    assert stop["step"] == before and "SIGTERM" in stop["reason"]
    run_small(tmp_path, [*LONG, "checkpoint.resume=auto"])
    assert without_times(tmp_path / "small") == without_times(timed_run)
    assert [line["step"] for line in of_event(tmp_path / "small", "started")] == [0, before]


def test_why_a_run_failed_is_in_its_log(tmp_path):
    before = dist.Work.wait
    with pytest.raises(TrainingStoppedError):
        run_small(tmp_path, ["optim.dense.lr=1e38", "optim.dense.schedule.warmup=0"])
    last = logged(tmp_path / "small")[-1]
    assert last["event"] == "failed" and "step" in last["reason"]
    assert "in train_step" in last["traceback"]
    assert dist.Work.wait is before
