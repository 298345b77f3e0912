"""Step times by phase and rank, the log and the trace of a rank; monitoring changes no result."""

import gzip
import json
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stampede.engine.errors import TrainingStoppedError
from stampede.engine.processes import Processes, processes
from stampede.engine.watching.heartbeat import PHASES, Heartbeat
from stampede.engine.watching.monitor import (
    Monitor,
    PhaseTimes,
    over_ranks,
    sentence_of,
    waits_counted,
)
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


STEP = {"reading the next batch": 1.0, "sending ids": 2.0, "between steps": 0.5,
        "looking up": 4.0, "computing": 8.0}  # fmt: skip


class Watched:
    """Times of steps that last as long as they are told."""

    def __init__(self, **options):
        self.clock, self.heartbeat = SetClock(), Heartbeat()
        self.times = PhaseTimes(self.clock, **options)

    def step(self, stages=STEP):
        with self.heartbeat.listening(self.times.begin):
            for stage, seconds in stages.items():
                self.heartbeat.beat(stage)
                self.clock.now += seconds
        self.times.end_step()


def test_phases_are_the_whole_step_and_evaluations_are_outside():
    watched = Watched()
    clock, heartbeat = watched.clock, watched.heartbeat
    clock.now = 100.0
    watched.step()
    clock.now += 3.0
    with heartbeat.listening(watched.times.begin):
        for _ in range(2):
            heartbeat.beat("evaluating")
            clock.now += 10.0
        # Two batches of an evaluation take no more memory than one.
        assert len(watched.times._step) == 1
        with heartbeat.slowly("saving"):
            clock.now += 7.0
        clock.now += 1.0
    watched.step()
    window = watched.times.take()
    assert window["steps"] == 2 and window["step_seconds"]["max"] == 15.5 + 3.0
    assert window["step_seconds"]["mean"] == pytest.approx(15.5 + 3.0 / 2)
    means = {**dict.fromkeys(PHASES, 0.0), **STEP, "computing": 8.0 + 3.0 / 2}
    assert window["phase_seconds"] == pytest.approx(means)
    # What was before the first stage of training is no part of a step.
    assert window["outside_seconds"] == {
        "starting": 100.0, "evaluating": 20.0, "saving": 7.0, "continuing after saving": 1.0,
    }  # fmt: skip
    # The next window begins anew.
    watched.step()
    window = watched.times.take()
    assert window["steps"] == 1 and not window["outside_seconds"]
    assert window["step_seconds"] == dict.fromkeys(["p50", "p90", "p99", "max", "mean"], 15.5)


def test_a_gpu_is_only_waited_for_at_the_end_of_a_window():
    watched = Watched()
    for _ in range(100):
        watched.step()
    # It may be 16 steps behind.
    assert watched.clock.read == pytest.approx(84 * 15.5)
    assert watched.times.take()["steps"] == 100 and watched.clock.read == watched.clock.now


def test_waits_of_this_thread_count_within_a_step(monkeypatch):
    watched = Watched()
    clock, heartbeat, times = watched.clock, watched.heartbeat, watched.times

    class Work:
        def wait(self):
            clock.now += 3.0
            return "waited"

    before = Work.wait
    monkeypatch.setattr(dist, "Work", Work)
    with heartbeat.listening(times.begin), waits_counted(times):
        heartbeat.beat("evaluating")
        Work().wait()
        heartbeat.beat("computing")
        assert Work().wait() == "waited"
        # That of a checkpoint's writer.
        writer = threading.Thread(target=lambda: Work().wait())
        writer.start()
        writer.join()
        times.end_step()
    assert Work.wait is before
    window = times.take()
    assert window["communication_seconds"] == 3.0 and window["phase_seconds"]["computing"] == 6.0


def window(computing, waiting=0.0, memory=0):
    """Of steps that read for a tenth of a second, compute and wait on the GPU's stream."""
    watched = Watched(exchanges=["adding up the loss"])
    for one in computing:
        watched.step(
            {"reading the next batch": 0.1, "computing": one, "adding up the loss": waiting}
        )
    return watched.times.take() | {"peak_memory_bytes": memory}


def test_the_slowest_rank_is_the_one_that_waits_least():
    """Steps of all ranks last equally long, as they wait for each other."""
    found = over_ranks([window([1.0], 2.0, 10), window([2.9], 0.1, 30), window([2.0], 1.0, 20)])
    assert found["slowest_seconds"] == pytest.approx({"rank": 1, "own": 3.0, "others": 1.6})
    assert found["peak_memory_bytes"] == 30
    assert found["communication_seconds"] == pytest.approx(3.1 / 3)
    assert sum(found["phase_seconds"].values()) == pytest.approx(found["step_seconds"]["mean"])
    # The largest percentiles of any rank.
    found = over_ranks([window(range(101)), window([60.0])])["step_seconds"]
    assert [found[name] for name in ("p50", "p90", "p99", "max")] == pytest.approx(
        [60.1, 90.1, 99.1, 100.1]
    )
    line = {"step": 3, **over_ranks([window([0.2], 0.2), window([0.4])])}
    here = Processes(0, 2, 1, torch.device("cpu"), hosts=("north", "south"))
    said = sentence_of(line, here)
    for part in ("step 3: p50 500 ms", "reading 20.0%", "communication 20.0%",
                 "slowest rank 1 on south: 500 ms w"):  # fmt: skip
        assert part in said


def test_a_full_disk_ends_the_log_with_one_sentence(tmp_path, capsys):
    config = small_config(tmp_path)
    with files_of_at_most(0), processes("cpu") as here, Monitor(config, here, tmp_path, 0):
        pass
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    path = tmp_path / "logs/rank_0.jsonl"
    assert said.startswith(f"rank 0: {path}: the log cannot be written (File too large); ")


# 8 steps an epoch.
LONG = ["train.epochs=2", "evaluate.every=3", "train.timing_every=3"]


@pytest.fixture(scope="module")
def timed_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timed")
    run_small(folder, LONG)
    return folder / "small"


@pytest.mark.slow
def test_times_are_logged_at_fixed_steps_and_at_an_epochs_end(timed_run):
    found = [line for line in lines(timed_run) if line["kind"] == "timing"]
    by_rank = [line for line in logged(timed_run) if line["event"] == "timing"]
    assert [line["step"] for line in found] == [3, 6, 8, 9, 12, 15, 16]
    assert [(line["step"], line["steps"]) for line in by_rank] == [
        (3, 3), (6, 3), (8, 2), (9, 1), (12, 3), (15, 3), (16, 1),
    ]  # fmt: skip
    for line in found:
        assert line["phase_seconds"]["computing"] > 0 < line["phase_seconds"]["updating tables"]
        assert line["slowest_seconds"]["rank"] == 0 and line["slowest_seconds"]["others"] is None
        assert 1e8 < line["peak_memory_bytes"] < 1e11
    outside = [set(line["outside_seconds"]) for line in by_rank]
    assert "evaluating" not in outside[0] and {"evaluating", "computing metrics"} <= outside[1]
    assert {"evaluating", "saving"} <= outside[3]
    # Without the rows that are brought up to date in the end; the clocks begin a little apart.
    timed = sum(line["steps"] * line["step_seconds"]["mean"] for line in by_rank)
    trained = [line for line in lines(timed_run) if line["kind"] == "evaluation"][-1]
    assert 0.8 * trained["train_seconds"] < timed < 1.05 * trained["train_seconds"]

    first, *_, last = logged(timed_run)
    assert first["event"] == "started" and first["process"] == os.getpid()
    assert (first["rank"], first["world_size"], first["step"]) == (0, 1, 0)
    assert {"torch", "torchrec", "python"} <= first["versions"].keys()
    assert last["event"] == "ended" and last["step"] == 16

    board = EventAccumulator(str(timed_run / "tensorboard"))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("timing/step_seconds/p50")]
    assert shown == [
        (line["step"], pytest.approx(line["step_seconds"]["p50"], rel=1e-6)) for line in found
    ]


@pytest.mark.slow
def test_untimed_runs_compute_the_same(timed_run, tmp_path):
    run_small(tmp_path, [*LONG[:2], "train.timing_every=0"])
    assert [line["event"] for line in logged(tmp_path / "small")] == ["started", "ended"]
    assert without_times(tmp_path / "small") == [
        line for line in without_times(timed_run) if line["kind"] != "timing"
    ]


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


TRACE = "profile/rank_0.pt.trace.json.gz"


def traced(run):
    """How often each event is in the trace, and the steps in it."""
    with gzip.open(run / TRACE, "rt") as file:
        found = Counter(
            event["name"]
            for event in json.load(file)["traceEvents"]
            if event.get("ph") == "X" and event.get("cat") != "gpu_user_annotation"
        )
    # The name by which TensorBoard finds steps.
    return found, sorted(int(name[13:]) for name in found if name.startswith("ProfilerStep#"))


def test_the_requested_steps_are_traced(tmp_path, capsys):
    run_small(tmp_path, trace(3, 2))
    run = tmp_path / "small"
    found, steps = traced(run)
    assert steps == [3, 4]
    for event in ("reading the next batch", "computing", "updating tables",
                  "aten::binary_cross_entropy_with_logits"):  # fmt: skip
        assert found[event] == 2, event
    assert f"steps 3 to 4 are traced: {run / TRACE}" in capsys.readouterr().out
    assert [path.name for path in (run / "profile").iterdir()] == [Path(TRACE).name]


@pytest.mark.wide
def test_the_log_and_the_trace_go_on_with_the_run(timed_run, tmp_path, capsys):
    run = tmp_path / "small"
    run_disturbed(tmp_path, [*LONG, *trace(3, 100)], 4)
    stop = logged(run)[-1]
    assert stop["event"] == "stopped" and stop["step"] == 4 and "SIGTERM" in stop["reason"]
    # What was traced until then is kept until there is more.
    assert traced(run)[1] == [3, 4]
    run_small(tmp_path, [*LONG, *trace(3, 100), "checkpoint.resume=auto"])
    assert without_times(run) == without_times(timed_run)
    assert [line["step"] for line in logged(run) if line["event"] == "started"] == [0, 4]
    assert traced(run)[1] == list(range(5, 17))
    run_small(tmp_path, [*trace(9, 3), "run.overwrite=true"])
    assert not (run / "profile").exists()
    said = "train.profile asks for steps 9 to 11, but training ended after step 8 without them"
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "small").mkdir()
    (tmp_path / "small/config.yaml").write_text("")
    (tmp_path / "small/profile").write_text("a file")
    run_small(tmp_path, [*trace(2, 2), "checkpoint.resume=auto"])
    assert capsys.readouterr().err.count("the trace cannot be written (") == 1
    assert logged(tmp_path / "small")[-1]["event"] == "ended"
