"""A run that diverges stops, and its newest checkpoint is one of before."""

import pytest

from stampede.engine.checkpoint import newest, read_manifest
from stampede.engine.errors import TrainingStoppedError
from support.checkpoints import sign, values_of
from support.diverging import LONG, SAVED, broken, poisoned, same_run
from support.jobs import lines, run_small

pytestmark = pytest.mark.slow


def test_a_run_stops_and_goes_on_from_its_newest_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        poisoned(patch, [7])
        with pytest.raises(TrainingStoppedError, match=r"the loss is nan at step 7.*Try a lower"):
            run_small(tmp_path, SAVED)
    last = lines(tmp_path / "small")[-1]
    assert (last["kind"], last["step"]) == ("stopped", 7)
    assert read_manifest(newest(tmp_path / "small/checkpoints")).progress.step == 6
    run_small(tmp_path, [*SAVED, "checkpoint.resume=auto"])
    run_small(tmp_path, [*SAVED, "run.name=undisturbed"])
    same_run(tmp_path / "small", tmp_path / "undisturbed")


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    broken(monkeypatch, 7)
    with pytest.raises(TrainingStoppedError, match="not finite after step 7"):
        run_small(tmp_path, [*LONG, "checkpoint.every_steps=1"])
    last = lines(tmp_path / "small")[-1]
    assert (last["kind"], last["step"]) == ("stopped", 7)
    assert "the dense layers are not finite" in last["reason"]
    assert read_manifest(newest(tmp_path / "small/checkpoints")).progress.step == 6


def test_an_evaluation_that_is_not_finite_is_a_divergence(tmp_path, monkeypatch):
    broken(monkeypatch, 8)
    with pytest.raises(TrainingStoppedError, match="the logloss of the validation part is"):
        run_small(tmp_path, LONG)
    assert list((tmp_path / "small/checkpoints").iterdir()) == []


def test_a_checkpoint_of_a_version_that_rolled_back_is_continued(tmp_path):
    run_small(tmp_path, [])
    path = newest(tmp_path / "small/checkpoints")
    values = values_of(path)
    values["progress"].update(rollbacks=1, dense_fraction=0.5)
    sign(path, values)
    run_small(tmp_path, ["checkpoint.resume=auto", "train.epochs=2"])
    assert read_manifest(newest(tmp_path / "small/checkpoints")).progress.step == 16
