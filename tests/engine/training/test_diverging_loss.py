"""Runs that diverge stop with a good checkpoint; batches that are skipped."""

import math
import re

import pytest
import torch

from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest
from stampede.engine.errors import DivergedError, TrainingStoppedError
from stampede.engine.training import trainer
from support.jobs import lines, run_small, same_end
from support.stopping import kill, poisoned, run_disturbed

# 8 steps an epoch, at a dense rate of 5e-4 for a batch of 256.
LONG = ["train.epochs=2", "evaluate.every=3", "optim.dense.schedule.warmup=0"]
SAVED = [*LONG, "checkpoint.every_steps=2"]


@pytest.mark.slow
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
    same_end(tmp_path / "small", tmp_path / "undisturbed")


def after_step(patch, at, action):
    """Do something with the job when a step has been taken."""
    take = trainer.train_step

    def disturbed(job, sent, step, *further):
        loss = take(job, sent, step, *further)
        if step == at:
            action(job)
        return loss

    patch.setattr(trainer, "train_step", disturbed)


def broken(patch, at):
    """Let a step leave an infinite weight."""
    after_step(patch, at, lambda job: [*job.dense_parameters.values()][-1].data.fill_(math.inf))


@pytest.mark.slow
def test_a_signal_after_a_divergence_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        broken(patch, 10)
        stop = run_disturbed(tmp_path, [*LONG, "train.log_every=4"], 10)
    assert re.search("not saved, as .*not finite", str(stop)) and stop.signal == 15
    found = [path.name for path in (tmp_path / "small/checkpoints").iterdir()]
    assert found == ["epoch_0001"]


SKIPS = "train.on_nonfinite=skip_batch"


@pytest.mark.wide
def test_a_batch_that_is_skipped_changes_nothing(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        poisoned(patch, [5, 6, 12])
        run_small(tmp_path, [*SAVED, SKIPS])
        assert "batches skipped  3 of 16, losses not finite" in capsys.readouterr().out
        # A run that is killed between them goes on.
        again = [*SAVED, SKIPS, "run.name=killed"]
        run_disturbed(tmp_path, again, 10, kill)
        run_small(tmp_path, [*again, "checkpoint.resume=auto"])
    same_end(tmp_path / "small", tmp_path / "killed")
    skipped = [line for line in lines(tmp_path / "small") if line["kind"] == "skipped_batch"]
    assert [(line["step"], line["loss"]) for line in skipped] == [(5, None), (6, None), (12, None)]


# Its buffers follow its batches.
BATCH_NORM = """
import torch
from torch import nn
from stampede.models import register

@register("own_norm")
class OwnNorm(nn.Module):
    def __init__(self, shape, generator):
        super().__init__()
        self.norm = nn.BatchNorm1d(shape.inputs)
        self.last = nn.Linear(shape.inputs, 1)

    def forward(self, embeddings, dense):
        inputs = torch.cat([embeddings.flatten(1), dense], 1)
        return self.last(self.norm(inputs)).squeeze(1)
"""


@pytest.fixture
def with_batch_norm(tmp_path, registered):
    """Overrides of a network that keeps means of its batches."""
    (tmp_path / "own.py").write_text(BATCH_NORM)
    return [f"model.import={tmp_path}/own.py", "model.name=own_norm"]


def test_a_batch_that_is_skipped_leaves_the_means_of_batches(
    tmp_path, monkeypatch, with_batch_norm
):
    seen = []

    def note(job):
        seen.append({name: buffer.clone() for name, buffer in job.dense_buffers.items()})

    poisoned(monkeypatch, [3])
    for step in (1, 2, 3):
        after_step(monkeypatch, step, note)
    run_small(tmp_path, [SKIPS, *with_batch_norm])
    first, second, third = seen
    assert len(first) == 3
    for name, buffer in second.items():
        assert torch.equal(buffer, third[name]) and not torch.equal(buffer, first[name])


@pytest.mark.slow
def test_means_of_batches_that_are_not_finite_are_not_saved(tmp_path, monkeypatch, with_batch_norm):
    mean = "network.norm.running_mean"
    after_step(monkeypatch, 4, lambda job: job.dense_buffers[mean].fill_(math.nan))
    with pytest.raises(DivergedError, match=r"finite after step 4 \(network\.norm\.running_mean"):
        run_small(tmp_path, [*SAVED, *with_batch_norm])
    assert read_manifest(newest(tmp_path / "small/checkpoints")).progress.step == 2


@pytest.mark.slow
def test_ten_skipped_batches_in_a_row_are_a_divergence(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        poisoned(patch, range(2, 11))
        run_small(tmp_path, [*LONG, SKIPS])
    poisoned(monkeypatch, range(2, 12))
    with pytest.raises(TrainingStoppedError, match="losses of 10 steps in a row, up to step 11, "):
        run_small(tmp_path, [*LONG, SKIPS, "run.overwrite=true"])
