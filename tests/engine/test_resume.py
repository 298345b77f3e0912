"""Runs that are stopped, killed or changed, and what continues from their checkpoints."""

import json
import signal
from unittest import mock

import pytest
import torch

from stampede.engine import evaluate as evaluation
from stampede.engine import run_folder, stop
from stampede.engine.errors import InterruptedRunError, TrainingStoppedError
from stampede.engine.processes import processes
from stampede.engine.stop import Agreement, StopRequestedError
from support.diverging import same_run
from support.jobs import run_small, without_times
from support.ranks import run_ranks
from support.soak import same_end
from support.stopping import ask_to_stop, kill, run_disturbed

# 8 steps an epoch.
LONG = ["train.epochs=2", "evaluate.every=3"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_small(folder, LONG)
    return folder / "small"


@pytest.mark.slow
@pytest.mark.parametrize(
    "action, step, saved",
    [(kill, 9, 8), (kill, 12, 10), (ask_to_stop, 4, 4), (ask_to_stop, 16, 16)],
)
def test_a_run_continues_from_its_newest_checkpoint(
    tmp_path, capsys, undisturbed, action, step, saved
):
    """After a kill; a signal stops it after the step, and saves it."""
    every = ["checkpoint.every_steps=2", "checkpoint.keep=100"] if action is kill else []
    stop = run_disturbed(tmp_path, [*LONG, *every], step, action)
    if action is ask_to_stop:
        assert f"SIGTERM after step {step}" in str(stop) and stop.signal == signal.SIGTERM
    run_small(tmp_path, [*LONG, *every, "checkpoint.resume=auto"])
    assert f"continuing after step {saved} from" in capsys.readouterr().out
    same_run(tmp_path / "small", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("which, step", [(1, 3), (5, 8)])
def test_an_interrupted_evaluation_is_repeated(tmp_path, monkeypatch, undisturbed, which, step):
    evaluate, begun = evaluation.evaluate, []

    def disturbed(*arguments):
        if len(begun) == which:
            ask_to_stop()
        begun.append(arguments)
        return evaluate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", disturbed)
        with pytest.raises(InterruptedRunError, match=f"SIGTERM after step {step}"):
            run_small(tmp_path, LONG)
    run_small(tmp_path, [*LONG, "checkpoint.resume=auto"])
    same_run(tmp_path / "small", undisturbed)


@pytest.mark.slow
def test_checkpoints_by_the_clock(tmp_path, undisturbed):
    run_small(tmp_path, [*LONG, "checkpoint.every_minutes=1e-9", "checkpoint.keep=100"])
    same_run(tmp_path / "small", undisturbed)
    names = {path.name for path in (tmp_path / "small/checkpoints").iterdir()}
    within = {f"step_{step:08d}" for step in range(1, 16) if step != 8}
    assert names == within | {"epoch_0001", "epoch_0002"}


@pytest.mark.slow
def test_an_epoch_without_an_evaluation_can_end_with_a_checkpoint(tmp_path):
    overrides = ["train.epochs=3", "evaluate.every_epochs=3"]
    run_small(tmp_path, overrides)
    whole = without_times(tmp_path / "small")
    overrides += ["checkpoint.every_steps=8", "run.name=again"]
    run_disturbed(tmp_path, overrides, 10, kill)
    run_small(tmp_path, [*overrides, "checkpoint.resume=auto"])
    assert without_times(tmp_path / "again") == whole


@pytest.mark.slow
def test_a_second_signal_ends_at_once_unless_it_is_torchruns_copy(monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with processes("cpu") as here, (agreement := Agreement(here)).noting_signals():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        with pytest.raises(StopRequestedError, match="SIGINT"):
            agreement.after(1)
        monkeypatch.setattr(stop, "_ONE_REQUEST_SECONDS", 0.0)
        with pytest.raises(SystemExit) as end:
            signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 128 + signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.slow
def test_a_continued_run_may_have_fewer_epochs_than_already_begun(tmp_path):
    overrides = ["train.epochs=5", "evaluate.every_epochs=5"]
    run_disturbed(tmp_path, overrides, 10)
    run_small(tmp_path, ["train.epochs=1", *overrides[1:], "checkpoint.resume=auto"])
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    assert summary["steps"] == 10 and summary["auc"] > 0


@pytest.mark.slow
def test_resume_continues_as_if_nothing_had_happened(tmp_path, capsys):
    """From the newest whole checkpoint, whatever a kill or a damage left after it."""
    run_small(tmp_path, ["train.epochs=3", "run.name=whole"])
    run_small(tmp_path, ["train.epochs=2"])
    whole, run = tmp_path / "whole", tmp_path / "small"
    # Steps done after the newest checkpoint, by a run that was then killed.
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 17, "loss": 9.0}) + "\n")
        # As a file system may leave it after a power loss.
        file.write("\0" * 40 + "\n")
        file.write('{"kind": "tra')
    # As a kill while the folder was made leaves it.
    (run / ".config.yaml.tmp").write_text("run:")
    next((run / "checkpoints/epoch_0002").glob("*.distcp")).write_bytes(b"")
    run_small(tmp_path, ["train.epochs=3", "checkpoint.resume=auto"])
    same_end(run, whole)
    printed = capsys.readouterr().out
    assert "epoch_0002: damaged checkpoint (" in printed and "epoch_0001 is used" in printed
    assert printed.count("new setting: ") == printed.count("train.epochs=3 (was 2)") == 1


REGULARIZED = [
    "model.first_order_scale=8",
    "model.dropout=0.2",
    "model.normalization=layer",
    "optim.dense.weight_decay=0.1",
    "optim.embedding.plateau={factor: 0.5, patience: 0, threshold: 0.1}",
    "optim.dense.plateau={factor: 0.5, patience: 1, threshold: 0.1}",
]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_numbers_decay_and_plateaus_continue(tmp_path, ranks):
    def trained(name, *overrides):
        # As other programs, a run before it, or a process of its own would leave it.
        torch.seed()
        arguments = [tmp_path, [*REGULARIZED, f"run.name={name}", *overrides], ranks]
        run_ranks(ranks, run_small, *arguments) if ranks > 1 else run_small(*arguments)

    trained("whole", "train.epochs=3")
    trained("parts", "train.epochs=2")
    trained("parts", "train.epochs=3", "checkpoint.resume=auto")
    same_end(tmp_path / "parts", tmp_path / "whole")


def test_no_checkpoint_before_its_lines_are_synced(tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(run_folder.os, "fsync", full)
        with pytest.raises(TrainingStoppedError, match=r"results cannot be written .No space left"):
            run_small(tmp_path, [])
    assert list((tmp_path / "small/checkpoints").iterdir()) == []
    run_small(tmp_path, ["checkpoint.resume=auto"])


def test_an_undefined_auc_is_shown_and_survives_a_resume(tmp_path, capsys):
    # The only validation row is of one class.
    overrides = ["data.rows=100", "data.validation_fraction=0.01", "train.epochs=2",
                 "train.batch_size=64"]  # fmt: skip
    for more in ([], ["checkpoint.resume=auto"]):
        run_small(tmp_path, [*overrides, *more])
        text = (tmp_path / "small/metrics.jsonl").read_text()
        assert "NaN" not in text and '"auc": null' in text
        summary = json.loads((tmp_path / "small/summary.json").read_text())
        assert summary["best_epoch"] == 2 and 0 < summary["best_auc"] < 1
    printed = capsys.readouterr().out
    assert printed.count("all 2 epochs are already trained; to train more, raise") == 1
    assert printed.count("epoch 2: the last one, as the AUC of the validation part is undefi") == 2
