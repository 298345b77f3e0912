"""The way back of a run that diverges, to the newest checkpoint, at a lower rate."""

import json

import pytest

from stampede.engine.checkpoint import newest, read_manifest
from stampede.engine.errors import TrainingStoppedError
from support.diverging import (
    LONG,
    ONCE,
    SAVED,
    TOO_HIGH,
    KilledError,
    broken,
    kill,
    poisoned,
    rollbacks,
    same_run,
)
from support.jobs import lines, run_small, without_times
from support.stopping import before_step

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    """A run that diverged in step 7 and was rolled back to the checkpoint after step 6."""
    folder = tmp_path_factory.mktemp("rolled_back")
    with pytest.MonkeyPatch.context() as patch:
        poisoned(patch, [7], TOO_HIGH)
        run_small(folder, [*SAVED, ONCE])
    return folder / "small"


def test_the_same_batches_come_again_at_a_lower_rate(tmp_path, rolled_back):
    """As a run that is stopped there, and continued with half of the rate."""
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 7, kill)
        with pytest.raises(KilledError):
            run_small(tmp_path, SAVED)
    run_small(tmp_path, [*SAVED, "checkpoint.resume=auto", "optim.dense.lr=5e-4"])
    same_run(rolled_back, tmp_path / "small")


def test_a_rollback_is_logged_where_it_happened(rolled_back):
    (line,) = rollbacks(rolled_back)
    assert (line["step"], line["diverged_step"]) == (6, 7)
    assert (line["rollbacks"], line["dense_fraction"]) == (1, 0.5)
    assert line["reason"].startswith("the loss is nan at step 7; the weights are as before")
    logged = lines(rolled_back)
    before, after = logged[: logged.index(line)], logged[logged.index(line) + 1 :]
    assert max(other["step"] for other in before) == 6
    assert min(other["step"] for other in after) == 8
    assert {other["dense_lr"] for other in before if other["kind"] == "train"} == {5e-4}
    assert {other["dense_lr"] for other in after if other["kind"] == "train"} == {2.5e-4}
    assert json.loads((rolled_back / "summary.json").read_text())["rollbacks"] == 1
    progress = read_manifest(newest(rolled_back / "checkpoints")).progress
    assert (progress.rollbacks, progress.dense_fraction) == (1, 0.5)


def test_a_rollback_is_said(tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, [7], TOO_HIGH)
    run_small(tmp_path, [*SAVED, ONCE])
    said = capsys.readouterr().out
    assert "the loss is nan at step 7" in said
    assert "step_00000006, after step 6 (rollback 1 of 1); the dense layers go on with 0.5" in said
    assert "1, as the run diverged" in said


@pytest.mark.parametrize("killed_before", [8, 9, 13])
def test_a_run_that_is_killed_after_a_rollback_remembers_it(
    tmp_path, monkeypatch, rolled_back, killed_before
):
    with monkeypatch.context() as patch:
        poisoned(patch, [7], TOO_HIGH)
        before_step(patch, killed_before, kill)
        with pytest.raises(KilledError):
            run_small(tmp_path, [*SAVED, ONCE])
    # It does not diverge any more: a rate that was forgotten would be another one.
    run_small(tmp_path, [*SAVED, ONCE, "checkpoint.resume=auto"])
    assert without_times(tmp_path / "small") == without_times(rolled_back)
    same_run(tmp_path / "small", rolled_back)


def test_rows_of_steps_that_are_done_again_count_once(tmp_path, monkeypatch):
    # Step 7 was taken, and its rows had not been added up yet.
    overrides = [*SAVED, "train.log_every=100"]
    with monkeypatch.context() as patch:
        poisoned(patch, [8], TOO_HIGH)
        run_small(tmp_path, [*overrides, ONCE])
    (line,) = rollbacks(tmp_path / "small")
    assert (line["step"], line["diverged_step"]) == (6, 8)
    run_small(tmp_path, [*overrides, "run.name=undisturbed"])
    touched = [
        read_manifest(newest(tmp_path / name / "checkpoints")).progress.touched_rows
        for name in ("small", "undisturbed")
    ]
    assert touched[0] == touched[1]


def test_a_run_is_rolled_back_so_often_and_then_stops(tmp_path, monkeypatch):
    poisoned(monkeypatch, [7])
    with pytest.raises(
        TrainingStoppedError,
        match=r"nan at step 7.*rolled back 2 times before\. Raise train\.",
    ):
        run_small(tmp_path, [*SAVED, "train.on_divergence.rollbacks=2"])
    run = tmp_path / "small"
    # The second goes further back, to before the line of the first.
    assert [line["dense_fraction"] for line in rollbacks(run)] == [0.25]
    last = lines(run)[-1]
    assert (last["kind"], last["step"]) == ("stopped", 7) and "2 times" in last["reason"]
    progress = read_manifest(newest(run / "checkpoints")).progress
    assert (progress.step, progress.rollbacks) == (6, 2)
    # Nothing is left to a run that goes on from there, unless it is allowed more.
    with pytest.raises(TrainingStoppedError, match="2 times before"):
        run_small(tmp_path, [*SAVED, "train.on_divergence.rollbacks=2", "checkpoint.resume=auto"])
    monkeypatch.undo()
    poisoned(monkeypatch, [7], 1e-4)
    run_small(tmp_path, [*SAVED, "train.on_divergence.rollbacks=3", "checkpoint.resume=auto"])
    assert [line["dense_fraction"] for line in rollbacks(run)] == [0.25, 0.125]


def test_before_the_first_checkpoint_a_run_begins_again(tmp_path, monkeypatch):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    with monkeypatch.context() as patch:
        poisoned(patch, [3], TOO_HIGH)
        run_small(tmp_path / "one", [*LONG, ONCE])
    assert [line["step"] for line in rollbacks(tmp_path / "one/small")] == [0]
    run_small(tmp_path / "other", [*LONG, "optim.dense.lr=5e-4"])
    same_run(tmp_path / "one/small", tmp_path / "other/small")


def test_a_run_that_is_killed_before_its_first_step_begins_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        before_step(patch, 1, kill)
        with pytest.raises(KilledError):
            run_small(tmp_path, [*LONG, ONCE])
    run_small(tmp_path, [*LONG, ONCE, "checkpoint.resume=auto"])
    whole = without_times(tmp_path / "small")
    run_small(tmp_path, [*LONG, "run.name=whole"])
    assert without_times(tmp_path / "whole") == whole


def test_by_default_a_run_stops(tmp_path, monkeypatch):
    poisoned(monkeypatch, [7], TOO_HIGH)
    with pytest.raises(TrainingStoppedError, match=r"nan at step 7.*train\.on_divergence"):
        run_small(tmp_path, LONG)
    assert list((tmp_path / "small/checkpoints").iterdir()) == []
    assert lines(tmp_path / "small")[-1]["kind"] == "stopped"


def test_a_damaged_checkpoint_is_passed_over(tmp_path, monkeypatch, capsys):
    def damage():
        newest(tmp_path / "small/checkpoints").joinpath("manifest.json").write_text("")

    poisoned(monkeypatch, [7], TOO_HIGH)
    before_step(monkeypatch, 7, damage)
    run_small(tmp_path, [*SAVED, ONCE, "checkpoint.asynchronous=false"])
    said = capsys.readouterr().out
    assert "step_00000006: damaged checkpoint (" in said and "step_00000004, after step 4" in said
    (line,) = rollbacks(tmp_path / "small")
    assert (line["step"], line["diverged_step"]) == (4, 7)


def test_weights_that_cannot_be_saved_are_a_divergence(tmp_path, monkeypatch, rolled_back):
    broken(monkeypatch, 7)
    overrides = [*LONG, "checkpoint.every_steps=1"]
    with pytest.raises(TrainingStoppedError, match="not finite after step 7"):
        run_small(tmp_path, overrides)
    last = lines(tmp_path / "small")[-1]
    assert (last["kind"], last["step"]) == ("stopped", 7)
    assert "the dense layers are not finite" in last["reason"]
    run_small(tmp_path, [*overrides, ONCE, "run.overwrite=true"])
    assert [line["step"] for line in rollbacks(tmp_path / "small")] == [6]
    same_run(tmp_path / "small", rolled_back)


def test_an_evaluation_that_is_not_finite_is_a_divergence(tmp_path, monkeypatch):
    broken(monkeypatch, 8)
    run_small(tmp_path, [*LONG, ONCE])
    (line,) = rollbacks(tmp_path / "small")
    assert line["step"] == 0 and "the logloss of the validation part is" in line["reason"]
    assert line["diverged_step"] == 8
