"""Runs that diverge stop with a good checkpoint; losses that leap, batches that are skipped."""

import math
import re

import pytest
import torch

from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest
from stampede.engine.config import DivergenceSection
from stampede.engine.errors import DivergedError, TrainingStoppedError
from stampede.engine.training import trainer
from stampede.engine.training.diverging_loss import check_loss
from stampede.engine.training.progress import Progress
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


def swollen(patch, at):
    """Let a step leave finite weights that are far too large."""
    after_step(patch, at, lambda job: job.dense_parameters["bias"].data.fill_(1e3))


LEAP = ["train.on_divergence.loss_factor=3", "train.on_divergence.window=2"]


@pytest.mark.parametrize("every, found", [(1, 11), (2, 12)])
def test_a_step_whose_loss_leaps_is_not_saved(tmp_path, monkeypatch, every, found):
    """Also between two logged ones."""
    swollen(monkeypatch, 10)
    overrides = [*LONG, *LEAP, "train.log_every=4", f"checkpoint.every_steps={every}"]
    with pytest.raises(TrainingStoppedError, match=f"of step {found} is more than 3 t.*Try a low"):
        run_small(tmp_path, overrides)
    run = tmp_path / "small"
    progress = read_manifest(newest(run / "checkpoints")).progress
    assert progress.step == found - every and lines(run)[-1]["kind"] == "stopped"
    # A run that goes on is compared with them.
    losses = [line["loss"] for line in lines(run) if line["kind"] == "train"]
    assert progress.logged_losses == losses[:2]


@pytest.mark.slow
def test_a_signal_after_a_divergence_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    """Those whose loss leaps, and those that are not finite."""
    overrides = [*LONG, *LEAP, "train.log_every=4"]
    for spoil, reason in ((swollen, "the loss .* of step 11 is more"), (broken, "not finite")):
        with monkeypatch.context() as patch:
            spoil(patch, 10)
            step = 11 if spoil is swollen else 10
            stop = run_disturbed(tmp_path, [*overrides, "run.overwrite=true"], step)
        assert re.search(f"not saved, as .*{reason}", str(stop)) and stop.signal == 15
        found = [path.name for path in (tmp_path / "small/checkpoints").iterdir()]
        assert found == ["epoch_0001"]


def test_a_loss_is_compared_with_the_median_of_those_before():
    settings = DivergenceSection(loss_factor=3.0, window=3)
    progress = Progress(step=20)
    for loss in (100.0, 1.0, 2.0, 5.9, 5.9):
        # 100 is the first of too few, and no median of 1, 2 and 100.
        check_loss(loss, progress, settings, remember=True)
    assert progress.logged_losses == [2.0, 5.9, 5.9]
    progress.logged_losses = [100.0, 2.0, 5.9]
    check_loss(math.nan, progress, settings, remember=True)
    with pytest.raises(DivergedError, match=r"the loss 17\.71 of step 20 .* 3 times 5\.9, the med"):
        check_loss(17.71, progress, settings, remember=True)
    assert progress.logged_losses == [100.0, 2.0, 5.9]
    check_loss(17.69, progress, settings, remember=True)
    # Losses of batches without any weight are no measure, and nothing is without a factor.
    progress.logged_losses = [0.0, 0.0, 0.7]
    check_loss(0.7, progress, settings, remember=True)
    check_loss(1e30, progress, DivergenceSection(window=1), remember=True)
    assert progress.logged_losses == [0.0, 0.7, 0.7]


SKIPS = "train.on_nonfinite=skip_batch"


@pytest.mark.slow
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


def test_means_of_batches_that_are_not_finite_are_not_saved(tmp_path, monkeypatch, with_batch_norm):
    mean = "network.norm.running_mean"
    after_step(monkeypatch, 4, lambda job: job.dense_buffers[mean].fill_(math.nan))
    with pytest.raises(DivergedError, match=r"finite after step 4 \(network\.norm\.running_mean"):
        run_small(tmp_path, [*SAVED, *with_batch_norm])
    assert read_manifest(newest(tmp_path / "small/checkpoints")).progress.step == 2


def test_ten_skipped_batches_in_a_row_are_a_divergence(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        poisoned(patch, range(2, 11))
        run_small(tmp_path, [*LONG, SKIPS])
    poisoned(monkeypatch, range(2, 12))
    with pytest.raises(TrainingStoppedError, match="losses of 10 steps in a row, up to step 11, "):
        run_small(tmp_path, [*LONG, SKIPS, "run.overwrite=true"])
