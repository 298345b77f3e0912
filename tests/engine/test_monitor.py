"""Step times by phase and rank, the log and the trace of a rank; monitoring changes no result."""

import gzip
import io
import json
import os
import threading
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.profiler import profile

from stampede.engine.errors import TrainingStoppedError
from stampede.engine.heartbeat import PHASES, Heartbeat
from stampede.engine.monitor import (
    Monitor,
    PhaseTimes,
    log_file,
    over_ranks,
    sentence_of,
    trace_file,
    waits_counted,
)
from stampede.engine.processes import processes
from support.full_disk import files_of_at_most
from support.jobs import lines, run_small, small_config, without_times
from support.monitored import logged
from support.stopping import run_disturbed


class SetClock:
    """A clock that is set; it notes the latest mark whose time was asked for, as of a GPU."""

    def __init__(self):
        self.now, self.read = 0.0, 0.0

    def mark(self):
        return self.now

    def seconds(self, first, last):
        self.read = max(self.read, last)
        return last - first


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


def test_phases_are_the_whole_step_and_evaluations_are_outside(watched):
    clock, heartbeat, times = watched
    clock.now = 100.0
    for _ in range(2):
        take_step(heartbeat, clock)
        times.end_step()
    clock.now += 3.0
    take_step(heartbeat, clock, [("evaluating", 10.0), ("evaluating", 10.0)])
    # Two batches of an evaluation take no more memory than one.
    assert len(times._step.stages) == 2
    with heartbeat.slowly("saving"):
        clock.now += 7.0
    clock.now += 1.0
    take_step(heartbeat, clock)
    times.end_step()
    # What was before the first stage of training is no part of a step.
    window = times.take()
    assert window["steps"] == 3 and window["step_seconds"]["max"] == 15.5 + 3.0
    means = {**dict.fromkeys(PHASES, 0.0), **dict(STEP), "computing": 8.0 + 3.0 / 3}
    assert window["phase_seconds"] == pytest.approx(means)
    assert window["step_seconds"]["mean"] == pytest.approx(15.5 + 3.0 / 3)
    assert window["outside_seconds"] == {
        "starting": 100.0, "evaluating": 20.0, "saving": 7.0, "continuing after saving": 1.0,
    }  # fmt: skip
    # The next window begins anew.
    take_step(heartbeat, clock)
    times.end_step()
    window = times.take()
    assert window["steps"] == 1 and not window["outside_seconds"]
    assert window["step_seconds"] == dict.fromkeys(["p50", "p90", "p99", "max", "mean"], 15.5)


def test_a_gpu_is_only_waited_for_at_the_end_of_a_window(watched):
    clock, heartbeat, times = watched
    for _ in range(100):
        take_step(heartbeat, clock)
        times.end_step()
    # It may be 16 steps behind.
    assert clock.read == pytest.approx(84 * 15.5) and len(times._ended) == 16
    assert times.take()["steps"] == 100 and clock.read == clock.now


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
    window = times.take()
    assert window["communication_seconds"] == 3.0 and window["phase_seconds"]["computing"] == 7.0
    assert window["outside_seconds"] == {"starting": 0.0, "evaluating": 3.0}


def window(computing, waiting=0.0, memory=0):
    """Of steps that read for a tenth of a second, compute and wait on the GPU's stream."""
    clock, heartbeat = SetClock(), Heartbeat()
    times = PhaseTimes(clock, exchanges=["adding up the loss"])
    with heartbeat.listening(times.begin):
        for one in computing:
            stages = [("reading the next batch", 0.1), ("computing", one)]
            take_step(heartbeat, clock, [*stages, ("adding up the loss", waiting)])
            times.end_step()
    return times.take() | {"peak_memory_bytes": memory}


def test_percentiles_and_means_of_a_rank():
    found = window(np.random.default_rng(0).permutation(np.arange(101.0)), waiting=0.4)
    assert found["step_seconds"] == pytest.approx(
        {"p50": 50.5, "p90": 90.5, "p99": 99.5, "max": 100.5, "mean": 50.5}
    )
    assert found["communication_seconds"] == pytest.approx(0.4)


def test_the_slowest_rank_is_the_one_that_waits_least():
    """Steps of all ranks last equally long, as they wait for each other."""
    found = over_ranks([window([1.0], 2.0, 10), window([2.9], 0.1, 30), window([2.0], 1.0, 20)])
    assert found["slowest_seconds"] == pytest.approx({"rank": 1, "own": 3.0, "others": 1.6})
    assert found["peak_memory_bytes"] == 30
    assert found["communication_seconds"] == pytest.approx(3.1 / 3)
    assert sum(found["phase_seconds"].values()) == pytest.approx(found["step_seconds"]["mean"])
    # The largest percentiles of any rank.
    found = over_ranks([window([1.0, 9.0]), window([5.0, 5.0])])
    assert found["step_seconds"]["p50"] == pytest.approx(5.1)
    assert found["step_seconds"]["max"] == pytest.approx(9.1)


def test_the_sentence_for_the_console():
    line = {"step": 1500, **over_ranks([window([0.8], 0.1, 2 * 10**9)])}
    assert sentence_of(line, 1) == (
        "step 1,500: p50 1 s, p90 1 s, p99 1 s, max 1 s; reading 10.0%; memory 2.00 GB"
    )
    line = {"step": 3, **over_ranks([window([0.2], 0.2), window([0.4])])}
    assert sentence_of(line, 2) == (
        "step 3: p50 500 ms, p90 500 ms, p99 500 ms, max 500 ms; reading 20.0%; communication "
        "20.0%; slowest rank 1: 500 ms without waiting, the others 300 ms; memory 0 B"
    )


def test_a_full_disk_ends_the_log_with_one_sentence(tmp_path, capsys):
    config = small_config(tmp_path)
    with files_of_at_most(0), processes("cpu") as here, Monitor(config, here, tmp_path, 0):
        pass
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    path = log_file(tmp_path, 0)
    assert said.startswith(f"rank 0: {path}: the log cannot be written (File too large); ")


# 8 steps an epoch.
LONG = ["train.epochs=2", "evaluate.every=3", "train.timing_every=3"]


@pytest.fixture(scope="module")
def timed_run(tmp_path_factory):
    """The folder of a run, and what it printed."""
    folder = tmp_path_factory.mktemp("watched")
    with redirect_stdout(io.StringIO()) as printed:
        run_small(folder, LONG)
    return folder / "small", printed.getvalue()


def of_kind(run, kind):
    return [line for line in lines(run) if line["kind"] == kind]


def of_event(run, event):
    return [line for line in logged(run) if line["event"] == event]


def test_times_are_logged_at_fixed_steps_and_at_an_epochs_end(timed_run):
    run, printed = timed_run
    found, by_rank = of_kind(run, "timing"), of_event(run, "timing")
    assert [line["step"] for line in found] == [3, 6, 8, 9, 12, 15, 16]
    assert [line["step"] for line in by_rank] == [3, 6, 8, 9, 12, 15, 16]
    assert [line["steps"] for line in by_rank] == [3, 3, 2, 1, 3, 3, 1]
    said = [line.split(":")[0] for line in printed.splitlines() if "; reading " in line]
    assert said == ["step 3", "step 6", "step 9", "step 12", "step 15"]
    for line in found:
        # All phases take place: those of one process exchange nothing, but are entered.
        assert set(line["phase_seconds"]) == set(PHASES)
        assert line["phase_seconds"]["computing"] > 0 < line["phase_seconds"]["updating tables"]
        assert line["slowest_seconds"]["rank"] == 0 and line["slowest_seconds"]["others"] is None
        assert 1e8 < line["peak_memory_bytes"] < 1e11
        # A resumed run is compared without them.
        fields = line.keys() - {"kind", "step"}
        assert all(field.endswith(("_seconds", "_bytes")) for field in fields)
    outside = [set(line["outside_seconds"]) for line in by_rank]
    assert "evaluating" not in outside[0] and {"evaluating", "computing metrics"} <= outside[1]
    assert {"evaluating", "saving"} <= outside[3]
    # Without the rows that are brought up to date in the end; the clocks begin a little apart.
    timed = sum(line["steps"] * line["step_seconds"]["mean"] for line in by_rank)
    trained = of_kind(run, "evaluation")[-1]["train_seconds"]
    assert 0.8 * trained < timed < 1.05 * trained


def test_the_log_tells_of_begin_and_end(timed_run):
    first, *_, last = logged(timed_run[0])
    assert first["event"] == "started" and first["process"] == os.getpid()
    assert (first["rank"], first["world_size"], first["step"]) == (0, 1, 0)
    assert {"torch", "torchrec", "python"} <= first["versions"].keys()
    assert last["event"] == "ended" and last["step"] == 16 and last["time"].endswith("+00:00")


def test_tensorboard_has_the_numbers(timed_run):
    board = EventAccumulator(str(timed_run[0] / "tensorboard"))
    board.Reload()
    tags = board.Tags()["scalars"]
    assert {"timing/step_seconds/p99", "timing/slowest_seconds/own", "train/loss"} <= set(tags)
    shown = [(event.step, event.value) for event in board.Scalars("timing/step_seconds/p50")]
    expected = [
        (line["step"], line["step_seconds"]["p50"]) for line in of_kind(timed_run[0], "timing")
    ]
    assert shown == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]


def test_untimed_runs_compute_the_same(timed_run, tmp_path):
    before = dist.Work.wait
    run_small(tmp_path, [*LONG[:2], "train.timing_every=0"])
    assert dist.Work.wait is before
    assert [line["event"] for line in logged(tmp_path / "small")] == ["started", "ended"]
    assert without_times(tmp_path / "small") == [
        line for line in without_times(timed_run[0]) if line["kind"] != "timing"
    ]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_lines_and_appends_to_its_log(timed_run, tmp_path):
    run_disturbed(tmp_path, LONG, 4)
    (stop,) = of_event(tmp_path / "small", "stopped")
    assert stop["step"] == 4 and "SIGTERM" in stop["reason"]
    run_small(tmp_path, [*LONG, "checkpoint.resume=auto"])
    assert without_times(tmp_path / "small") == without_times(timed_run[0])
    assert [line["step"] for line in of_event(tmp_path / "small", "started")] == [0, 4]


def test_why_a_run_failed_is_in_its_log(tmp_path):
    before = dist.Work.wait
    with pytest.raises(TrainingStoppedError):
        run_small(tmp_path, ["optim.dense.lr=1e38", "optim.dense.schedule.warmup=0"])
    last = logged(tmp_path / "small")[-1]
    assert last["event"] == "failed" and "step" in last["reason"]
    assert "in train_step" in last["traceback"]
    assert dist.Work.wait is before


def trace(start, steps):
    return [f"train.profile.start={start}", f"train.profile.steps={steps}"]


def events_in(run, rank=0):
    """How often each event is in the trace."""
    with gzip.open(trace_file(run, rank), "rt") as file:
        events = json.load(file)["traceEvents"]
    found = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") != "gpu_user_annotation":
            found[event["name"]] = found.get(event["name"], 0) + 1
    return found


def steps_in(run):
    return sorted(int(name[5:]) for name in events_in(run) if name.startswith("step "))


def test_the_requested_steps_are_traced(tmp_path, capsys):
    run_small(tmp_path, trace(3, 2))
    run = tmp_path / "small"
    assert steps_in(run) == [3, 4]
    found = events_in(run)
    for phase in ("reading the next batch", "computing", "updating tables"):
        assert found[phase] == 2, phase
    assert found["aten::binary_cross_entropy_with_logits"] == 2
    assert f"steps 3 to 4 are traced: {trace_file(run, 0)}" in capsys.readouterr().out
    assert [path.name for path in (run / "profile").iterdir()] == [trace_file(run, 0).name]


@pytest.mark.slow
def test_a_trace_ends_with_the_run_and_steps_beyond_are_not_traced(tmp_path, capsys):
    run_small(tmp_path, trace(7, 100))
    assert steps_in(tmp_path / "small") == [7, 8]
    assert "steps 7 to 8 are traced: " in capsys.readouterr().out
    run_small(tmp_path, [*trace(9, 3), "run.overwrite=true"])
    assert not (tmp_path / "small/profile").exists()
    said = "train.profile asks for steps 9 to 11, but training ended after step 8 without them"
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_traces_what_is_left(tmp_path, capsys):
    run_disturbed(tmp_path, trace(3, 4), 4)
    # What was traced until then is kept until there is more.
    assert steps_in(tmp_path / "small") == [3, 4]
    run_small(tmp_path, [*trace(3, 4), "checkpoint.resume=auto"])
    assert steps_in(tmp_path / "small") == [5, 6]
    capsys.readouterr()
    run_small(tmp_path, [*trace(1, 2), "checkpoint.resume=auto", "train.epochs=2"])
    assert "no trace" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    (tmp_path / "small").mkdir()
    (tmp_path / "small/config.yaml").write_text("")
    (tmp_path / "small/profile").write_text("a file")
    run_small(tmp_path, [*trace(2, 2), "checkpoint.resume=auto"])
    assert capsys.readouterr().err.count("the trace cannot be written (") == 1
    assert [line["step"] for line in lines(tmp_path / "small") if line["kind"] == "train"][-1] == 8

    def busy(*_):
        raise RuntimeError("another profiler is active")

    monkeypatch.setattr(profile, "prepare_trace", busy)
    run_small(tmp_path, [*trace(2, 2), "run.name=busy"])
    assert capsys.readouterr().err.count("the trace cannot be written (another profiler is") == 1
