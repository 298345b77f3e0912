"""Losses that leap are a divergence where that is asked for."""

import math

import pytest

from stampede.engine import trainer
from stampede.engine.checkpoint import Progress, newest, read_manifest
from stampede.engine.config import DivergenceSection
from stampede.engine.divergence import check_logged_loss
from stampede.engine.errors import DivergedError, InterruptedRunError, TrainingStoppedError
from stampede.settings import SettingsError
from support.diverging import (
    LONG,
    SAVED,
    broken,
)
from support.jobs import lines, run_small, small_config
from support.stopping import ask_to_stop, before_step


def test_a_loss_that_leaps_is_a_divergence_where_it_is_asked_for(tmp_path, monkeypatch):
    take = trainer.train_step

    def leaping(job, sent, step, *further):
        loss = take(job, sent, step, *further)
        return loss * 100 if step == 10 else loss

    monkeypatch.setattr(trainer, "train_step", leaping)
    leap = ["train.on_divergence.loss_factor=5", "train.on_divergence.window=3"]
    with pytest.raises(TrainingStoppedError, match=r"of step 10 is more than 5 times.*Try a lower"):
        run_small(tmp_path, [*SAVED, *leap])
    run = tmp_path / "small"
    losses = [line["loss"] for line in lines(run) if line["kind"] == "train"]
    assert lines(run)[-1]["kind"] == "stopped"
    # Those of the newest checkpoint's own time, which a run that goes on is compared with.
    assert read_manifest(newest(run / "checkpoints")).progress.logged_losses == losses[1:4]
    run_small(tmp_path, [*SAVED, "run.overwrite=true"])


def swollen(patch, at):
    """Let a step leave finite weights that are far too large."""
    take = trainer.train_step

    def disturbed(job, sent, step, *further):
        loss = take(job, sent, step, *further)
        if step == at:
            job.dense_parameters["bias"].data.fill_(1e3)
        return loss

    patch.setattr(trainer, "train_step", disturbed)


LEAP = ["train.on_divergence.loss_factor=3", "train.on_divergence.window=2"]


@pytest.mark.parametrize("every, found", [(1, 11), (2, 12)])
def test_a_step_whose_loss_leaps_is_not_saved(tmp_path, monkeypatch, every, found):
    """Also between two logged ones."""
    swollen(monkeypatch, 10)
    overrides = [*LONG, *LEAP, "train.log_every=4", f"checkpoint.every_steps={every}"]
    with pytest.raises(TrainingStoppedError, match=f"of step {found} is more than 3 times"):
        run_small(tmp_path, overrides)
    saved = newest(tmp_path / "small/checkpoints")
    assert read_manifest(saved).progress.step == found - every


def test_a_signal_amid_spoilt_weights_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    """Those whose loss leaps, and those that are not finite."""
    overrides = [*LONG, *LEAP, "train.log_every=4"]
    for spoil, reason in ((swollen, "the loss .* of step 11 is more"), (broken, "not finite")):
        with monkeypatch.context() as patch:
            spoil(patch, 10)
            before_step(patch, 11 if spoil is swollen else 10, ask_to_stop)
            with pytest.raises(InterruptedRunError, match=f"not saved, as .*{reason}") as stop:
                run_small(tmp_path, [*overrides, "run.overwrite=true"])
        assert stop.value.signal == 15
        found = [path.name for path in (tmp_path / "small/checkpoints").iterdir()]
        assert found == ["epoch_0001"]


def test_losses_of_0_are_no_measure():
    """Those of batches without any weight."""
    progress = Progress(step=20, logged_losses=[0.0, 0.0, 0.7])
    settings = DivergenceSection(loss_factor=3.0, window=3)
    check_logged_loss(0.7, progress, settings)
    assert progress.logged_losses == [0.0, 0.7, 0.7]


def test_a_loss_is_compared_with_the_median_of_those_before():
    settings = DivergenceSection(loss_factor=3.0, window=3)
    progress = Progress(step=20)
    for loss in (100.0, 1.0, 2.0, 5.9, 5.9):
        # 100 is the first of too few, and no median of 1, 2 and 100.
        check_logged_loss(loss, progress, settings)
    assert progress.logged_losses == [2.0, 5.9, 5.9]
    check_logged_loss(math.nan, progress, settings)
    with pytest.raises(DivergedError, match=r"the loss 17\.71 of step 20 .* 3 times 5\.9, the med"):
        check_logged_loss(17.71, progress, settings)
    assert progress.logged_losses == [2.0, 5.9, 5.9]
    check_logged_loss(17.69, progress, settings)


def test_without_a_factor_no_loss_is_noted():
    progress = Progress(step=20)
    for loss in (1.0, 1e30):
        check_logged_loss(loss, progress, DivergenceSection(window=1))
    assert progress.logged_losses == []


@pytest.mark.parametrize("factor", ["0.5", "1"])
def test_a_factor_that_half_of_all_losses_exceed_is_refused(tmp_path, factor):
    with pytest.raises(SettingsError, match=r"train\.on_divergence\.loss_factor: .*above 1"):
        small_config(tmp_path, f"train.on_divergence.loss_factor={factor}")
