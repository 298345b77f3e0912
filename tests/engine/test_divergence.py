"""Runs that diverge: what is a divergence, and the way back to the newest checkpoint."""

import json
import math

import pytest
import torch

from stampede.engine import trainer
from stampede.engine.checkpoint import Progress, newest, read_manifest
from stampede.engine.config.divergence import DivergenceSection
from stampede.engine.divergence import check_logged_loss
from stampede.engine.errors import DivergedError, InterruptedRunError, TrainingStoppedError
from stampede.engine.inference.model import whole_model
from stampede.engine.inference.trained import open_trained
from stampede.models.registry import _NETWORKS
from stampede.settings import SettingsError
from support.batch_norm import BATCH_NORM
from support.diverging import poisoned
from support.jobs import lines, run_small, small_config, without_times
from support.stopping import ask_to_stop, before_step

# 8 steps an epoch, at a dense rate of 5e-4 for a batch of 256.
LONG = ["train.epochs=2", "evaluate.every=3", "optim.dense.schedule.warmup=0"]
SAVED = [*LONG, "checkpoint.every_steps=2"]
ONCE = "train.on_divergence.rollbacks=1"
# Between the scheduled rate and its half.
TOO_HIGH = 4e-4


class KilledError(Exception):
    """Stands for a kill: nothing is written any more."""


def kill():
    raise KilledError


def rollbacks(run):
    return [line for line in lines(run) if line["kind"] == "rollback"]


def same_run(one, other):
    """Whether two runs logged the same, but for rollbacks, and end with the same bits."""
    logged = [
        [line for line in without_times(run) if line["kind"] != "rollback"] for run in (one, other)
    ]
    assert logged[0] == logged[1]
    states = [
        whole_model(open_trained(run, "newest"), torch.device("cpu")).state_dict()
        for run in (one, other)
    ]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


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


def broken(patch, at):
    """Let a step leave an infinite weight, as long as the rate is too high."""
    take = trainer.train_step

    def disturbed(job, sent, step, *further):
        loss = take(job, sent, step, *further)
        if step == at and job.dense_optimizer.param_groups[0]["lr"] > TOO_HIGH:
            list(job.dense_parameters.values())[-1].data.fill_(math.inf)
        return loss

    patch.setattr(trainer, "train_step", disturbed)


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
