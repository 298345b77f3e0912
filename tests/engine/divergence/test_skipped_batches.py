"""Batches whose loss is not finite are skipped where that is asked for."""

import math

import pytest
import torch

from stampede.engine import trainer
from stampede.engine.errors import DivergedError, TrainingStoppedError
from stampede.models.registry import _NETWORKS
from support.batch_norm import BATCH_NORM
from support.diverging import LONG, SAVED, KilledError, kill, poisoned, same_run
from support.jobs import lines, run_small
from support.stopping import before_step

SKIPS = "train.on_nonfinite=skip_batch"


def test_a_batch_that_is_skipped_changes_nothing(tmp_path, monkeypatch, capsys):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    with monkeypatch.context() as patch:
        poisoned(patch, [5, 6, 12])
        run_small(tmp_path / "one", [*SAVED, SKIPS])
    assert "batches skipped  3 of 16, losses not finite" in capsys.readouterr().out
    skipped = [line for line in lines(tmp_path / "one/small") if line["kind"] == "skipped_batch"]
    assert [(line["step"], line["loss"]) for line in skipped] == [(5, None), (6, None), (12, None)]
    take = trainer.train_step

    def left_out(job, sent, step, *further):
        if step in (5, 6, 12):
            return torch.tensor(math.nan, dtype=torch.float64)
        return take(job, sent, step, *further)

    monkeypatch.setattr(trainer, "train_step", left_out)
    run_small(tmp_path / "other", [*SAVED, SKIPS])
    same_run(tmp_path / "one/small", tmp_path / "other/small")


@pytest.fixture
def with_batch_norm(tmp_path, monkeypatch):
    """Overrides of a network that keeps means of its batches."""
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))
    (tmp_path / "own.py").write_text(BATCH_NORM)
    return [f"model.import={tmp_path}/own.py", "model.name=own_norm"]


def test_a_batch_that_is_skipped_leaves_the_means_of_batches(
    tmp_path, monkeypatch, with_batch_norm
):
    seen = []

    def noting(job, sent, step, *further):
        before = {name: buffer.clone() for name, buffer in job.dense_buffers.items()}
        loss = take(job, sent, step, *further)
        same = [torch.equal(before[name], buffer) for name, buffer in job.dense_buffers.items()]
        seen.append((len(same), sum(same)))
        return loss

    poisoned(monkeypatch, [5])
    take = trainer.train_step
    monkeypatch.setattr(trainer, "train_step", noting)
    run_small(tmp_path, [*SAVED, SKIPS, *with_batch_norm])
    assert [same for _, same in seen] == [3 if step == 5 else 0 for step in range(1, 17)]
    assert {count for count, _ in seen} == {3}


def test_means_of_batches_that_are_not_finite_are_not_saved(tmp_path, monkeypatch, with_batch_norm):
    take = trainer.train_step

    def disturbed(job, sent, step, *further):
        loss = take(job, sent, step, *further)
        if step == 4:
            job.dense_buffers["network.norm.running_mean"][0] = math.nan
        return loss

    monkeypatch.setattr(trainer, "train_step", disturbed)
    with pytest.raises(DivergedError, match=r"finite after step 4 \(network\.norm\.running_mean"):
        run_small(tmp_path, [*SAVED, *with_batch_norm])


def test_a_run_that_is_killed_between_skipped_batches_goes_on(tmp_path, monkeypatch):
    poisoned(monkeypatch, [5, 6, 12])
    run_small(tmp_path, [*SAVED, SKIPS, "run.name=whole"])
    with monkeypatch.context() as patch:
        before_step(patch, 10, kill)
        with pytest.raises(KilledError):
            run_small(tmp_path, [*SAVED, SKIPS])
    run_small(tmp_path, [*SAVED, SKIPS, "checkpoint.resume=auto"])
    same_run(tmp_path / "small", tmp_path / "whole")


def test_ten_skipped_batches_in_a_row_are_a_divergence(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        poisoned(patch, range(2, 11))
        run_small(tmp_path, [*LONG, SKIPS])
    poisoned(monkeypatch, range(2, 12))
    with pytest.raises(TrainingStoppedError, match="losses of 10 steps in a row, up to step 11, "):
        run_small(tmp_path, [*LONG, SKIPS, "run.overwrite=true"])
