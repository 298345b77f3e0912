"""What a run leaves on its times, and that they change nothing."""

import os

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stampede.engine.errors import InterruptedRunError, TrainingStoppedError
from stampede.engine.pulse import PHASES
from support.jobs import lines, run_small, without_times
from support.monitored import logged
from support.stopping import ask_to_stop, before_step

# 8 steps an epoch.
LONG = ["train.epochs=2", "evaluate.every=3", "train.timing_every=3"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    run_small(folder, LONG)
    return folder / "small"


def timing(run):
    return [line for line in lines(run) if line["kind"] == "timing"]


def of_event(run, event):
    return [line for line in logged(run) if line["event"] == event]


def test_times_are_logged_at_fixed_steps_and_at_an_epochs_end(watched):
    found = timing(watched)
    assert [line["step"] for line in found] == [3, 6, 8, 9, 12, 15, 16]
    assert [line["step"] for line in of_event(watched, "timing")] == [3, 6, 8, 9, 12, 15, 16]
    assert [line["steps"] for line in of_event(watched, "timing")] == [3, 3, 2, 1, 3, 3, 1]
    for line in found:
        assert sum(line["phase_seconds"].values()) == pytest.approx(line["step_seconds"]["mean"])
        # All phases take place: those of one process exchange nothing, but are entered.
        assert set(line["phase_seconds"]) == set(PHASES)
        assert line["phase_seconds"]["computing"] > 0 < line["phase_seconds"]["updating tables"]
        assert line["slowest_seconds"]["rank"] == 0 and line["slowest_seconds"]["others"] is None
        assert 1e8 < line["peak_memory_bytes"] < 1e11
        fields = line.keys() - {"kind", "step"}
        assert all(field.endswith(("_seconds", "_bytes")) for field in fields)


def test_times_of_all_steps_are_the_time_of_training(watched):
    timed = sum(
        line["steps"] * line["step_seconds"]["mean"] for line in of_event(watched, "timing")
    )
    trained = [line["train_seconds"] for line in lines(watched) if line["kind"] == "evaluation"][-1]
    # Without the rows that are brought up to date in the end; the clocks begin a little apart.
    assert 0.8 * trained < timed < 1.05 * trained


def test_what_is_outside_of_steps(watched):
    outside = [set(line["outside_seconds"]) for line in of_event(watched, "timing")]
    assert "evaluating" not in outside[0]
    assert {"evaluating", "computing metrics"} <= outside[1]
    assert {"evaluating", "saving"} <= outside[3]


def test_the_log_tells_of_begin_and_end(watched):
    first, *_, last = logged(watched)
    assert first["event"] == "started" and first["process"] == os.getpid()
    assert (first["rank"], first["world_size"], first["step"]) == (0, 1, 0)
    assert {"torch", "torchrec", "python"} <= first["versions"].keys()
    assert last["event"] == "ended" and last["step"] == 16


def test_tensorboard_has_the_numbers(watched):
    board = EventAccumulator(str(watched / "tensorboard"))
    board.Reload()
    tags = board.Tags()["scalars"]
    assert {"timing/step_seconds/p99", "timing/slowest_seconds/own", "train/loss"} <= set(tags)
    shown = [(event.step, event.value) for event in board.Scalars("timing/step_seconds/p50")]
    logged_ = [(line["step"], line["step_seconds"]["p50"]) for line in timing(watched)]
    assert shown == [(step, pytest.approx(value, rel=1e-6)) for step, value in logged_]


def test_the_console_has_a_sentence_every_n_steps(tmp_path, capsys):
    run_small(tmp_path, ["train.timing_every=4", "train.epochs=2"])
    said = [line for line in capsys.readouterr().out.splitlines() if "; reading " in line]
    assert [line.split(":")[0] for line in said] == ["step 4", "step 8", "step 12", "step 16"]


def test_untimed_runs_compute_the_same(watched, tmp_path):
    before = dist.Work.wait
    run_small(tmp_path, [*LONG[:2], "train.timing_every=0"])
    assert dist.Work.wait is before
    assert timing(tmp_path / "small") == []
    assert [line["event"] for line in logged(tmp_path / "small")] == ["started", "ended"]
    assert without_times(tmp_path / "small") == [
        line for line in without_times(watched) if line["kind"] != "timing"
    ]


@pytest.mark.parametrize("before", [4, 8, 9])
def test_a_resumed_run_has_the_same_lines_and_appends_to_its_log(
    watched, tmp_path, monkeypatch, before
):
    with monkeypatch.context() as patch:
        before_step(patch, before, ask_to_stop)
        with pytest.raises(InterruptedRunError):
            run_small(tmp_path, LONG)
    (stop,) = of_event(tmp_path / "small", "stopped")
    assert stop["step"] == before and "SIGTERM" in stop["reason"]
    run_small(tmp_path, [*LONG, "checkpoint.resume=auto"])
    assert without_times(tmp_path / "small") == without_times(watched)
    assert [line["step"] for line in of_event(tmp_path / "small", "started")] == [0, before]


def test_why_a_run_failed_is_in_its_log(tmp_path):
    before = dist.Work.wait
    with pytest.raises(TrainingStoppedError):
        run_small(tmp_path, ["optim.dense.lr=1e38", "optim.dense.schedule.warmup=0"])
    last = logged(tmp_path / "small")[-1]
    assert last["event"] == "failed" and "step" in last["reason"]
    assert "in train_step" in last["traceback"]
    assert dist.Work.wait is before


def test_a_full_disk_for_the_logs_ends_no_run(tmp_path, capsys):
    (tmp_path / "small/logs").mkdir(parents=True)
    (tmp_path / "small/config.yaml").write_text("")
    (tmp_path / "small/logs/rank_0.jsonl").symlink_to("/dev/full")
    run_small(tmp_path, ["checkpoint.resume=auto", "train.timing_every=2"])
    assert capsys.readouterr().err.count("the log cannot be written (No space left") == 1
    assert len(timing(tmp_path / "small")) == 4
