"""Traces of torch.profiler on demand: which steps, what is in them, what is said where none is."""

import gzip
import json

import pytest
from torch.profiler import profile

from stampede.engine.monitor import trace_file
from support.jobs import lines, run_small
from support.stopping import run_disturbed


def trace(start, steps):
    return [f"train.profile.start={start}", f"train.profile.steps={steps}"]


def names(run, rank=0):
    """How often each event is in the trace."""
    with gzip.open(trace_file(run, rank), "rt") as file:
        events = json.load(file)["traceEvents"]
    found = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") != "gpu_user_annotation":
            found[event["name"]] = found.get(event["name"], 0) + 1
    return found


def steps_in(run):
    return sorted(int(name[5:]) for name in names(run) if name.startswith("step "))


def test_the_steps_that_were_asked_for(tmp_path, capsys):
    run_small(tmp_path, trace(3, 2))
    run = tmp_path / "small"
    assert steps_in(run) == [3, 4]
    found = names(run)
    for phase in ("reading the next batch", "computing", "updating tables"):
        assert found[phase] == 2, phase
    assert found["aten::binary_cross_entropy_with_logits"] == 2
    assert f"steps 3 to 4 are traced: {trace_file(run, 0)}" in capsys.readouterr().out
    assert [path.name for path in (run / "profile").iterdir()] == [trace_file(run, 0).name]


def test_the_first_step_and_a_run_that_ends_meanwhile(tmp_path, capsys):
    run_small(tmp_path, trace(1, 100))
    assert steps_in(tmp_path / "small") == list(range(1, 9))
    said = capsys.readouterr().out
    assert "steps 1 to 8 are traced only, as training ended there: " in said


@pytest.mark.slow
def test_steps_beyond_the_runs_end(tmp_path, capsys):
    run_small(tmp_path, trace(9, 3))
    assert not (tmp_path / "small/profile").exists()
    assert (
        "train.profile asks for steps 9 to 11, but training ended after step 8: no trace is written"
    ) in capsys.readouterr().out
    # The profiler is free again.
    run_small(tmp_path, ["run.name=again", *trace(2, 1)])
    assert steps_in(tmp_path / "again") == [2]


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
    trace_file(tmp_path / "small", 0).unlink()
    run_small(tmp_path, [*trace(1, 2), "checkpoint.resume=auto", "train.epochs=3"])
    said = capsys.readouterr().out
    assert "asks for steps 1 to 2, but 16 are already done: no trace is written" in said


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path, capsys, monkeypatch):
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
