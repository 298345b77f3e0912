"""Losses that leap are a divergence where that is asked for."""

import math

import pytest

from stampede.engine import trainer
from stampede.engine.checkpoint import Progress, newest, read_manifest
from stampede.engine.config.divergence import DivergenceSection
from stampede.engine.divergence import check_logged_loss
from stampede.engine.errors import DivergedError, InterruptedRunError, TrainingStoppedError
from stampede.settings import SettingsError
from support.diverging import (
    LONG,
    ONCE,
    SAVED,
    TOO_HIGH,
    broken,
    rollbacks,
)
from support.jobs import lines, run_small, small_config
from support.stopping import ask_to_stop, before_step


def test_a_loss_that_leaps_is_a_divergence_where_it_is_asked_for(tmp_path, monkeypatch):
    take = trainer.train_step

    def leaping(job, sent, step, *further):
        loss = take(job, sent, step, *further)
        too_high = job.dense_optimizer.param_groups[0]["lr"] > TOO_HIGH
        return loss * 100 if step == 10 and too_high else loss

    monkeypatch.setattr(trainer, "train_step", leaping)
    leap = ["train.on_divergence.loss_factor=5", "train.on_divergence.window=3"]
    run_small(tmp_path, [*SAVED, ONCE, *leap])
    run = tmp_path / "small"
    (line,) = rollbacks(run)
    assert (line["step"], line["diverged_step"]) == (8, 10)
    assert "is more than 5 times" in line["reason"]
    logged = [line for line in lines(run) if line["kind"] == "train"]
    # That of the leap was logged, and is cut.
    assert [line["step"] for line in logged] == list(range(2, 17, 2))
    losses = [line["loss"] for line in logged]
    # Those of the checkpoint's own time were compared, too, and those of the future are.
    assert read_manifest(newest(run / "checkpoints")).progress.logged_losses == losses[-3:]
    with pytest.raises(TrainingStoppedError, match=r"of step 10 is more than 5 times.*Try a lower"):
        run_small(tmp_path, [*SAVED, *leap, "run.overwrite=true"])
    run_small(tmp_path, [*SAVED, "run.overwrite=true"])


def swollen(patch, at):
    """Let a step leave finite weights that are far too large, as long as the rate is too high."""
    take = trainer.train_step

    def disturbed(job, sent, step, *further):
        loss = take(job, sent, step, *further)
        if step == at and job.dense_optimizer.param_groups[0]["lr"] > TOO_HIGH:
            job.dense_parameters["bias"].data.fill_(1e3)
        return loss

    patch.setattr(trainer, "train_step", disturbed)


LEAP = ["train.on_divergence.loss_factor=3", "train.on_divergence.window=2"]


@pytest.mark.parametrize(
    "every, to, found",
    [
        # The step after the weights were spoilt is saved, which the log does not see.
        (1, [9], 11),
        # Weights that were saved spoilt, and saved again, are found to be so the second time.
        (2, [10, 8], 12),
        # What is saved with a good loss is good.
        (3, [9], 12),
    ],
)
def test_spoilt_weights_are_not_gone_back_to(tmp_path, monkeypatch, every, to, found):
    def noting(rollbacks, failure, progress):
        left.append([read_manifest(path).progress.step for path in checkpoints.iterdir()])
        back = go_back(rollbacks, failure, progress)
        went.append((back.step, failure.step))
        return back

    left, went, go_back = [], [], trainer.Rollbacks.back
    checkpoints = tmp_path / "small/checkpoints"
    monkeypatch.setattr(trainer.Rollbacks, "back", noting)
    overrides = [*LONG, *LEAP, "train.log_every=4", "checkpoint.asynchronous=false"]
    # So high that it is too high after a rollback, too.
    rate = f"optim.dense.lr={1e-3 * len(to)}"
    swollen(monkeypatch, 10)
    run_small(
        tmp_path,
        [*overrides, rate, f"checkpoint.every_steps={every}", "train.on_divergence.rollbacks=2"],
    )
    assert went == [(step, found) for step in to]
    assert all(found not in steps for steps in left)
    logged = [line["step"] for line in lines(tmp_path / "small") if line["kind"] == "train"]
    assert logged == [4, 8, 12, 16]


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
