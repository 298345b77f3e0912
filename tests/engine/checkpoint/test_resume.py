"""Checkpoints, and runs that continue from them: after kills, full disks, changes."""

import json
from unittest import mock

import pytest
import torch

from stampede.engine.errors import TrainingStoppedError
from stampede.engine.results import run_folder
from support.jobs import run_small, same_end


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
    "model.normalization=batch",
    "optim.dense.weight_decay=0.1",
    "optim.embedding.plateau={factor: 0.5, patience: 0, threshold: 0.1}",
    "optim.dense.plateau={factor: 0.5, patience: 1, threshold: 0.1}",
]


@pytest.mark.wide
def test_random_numbers_decay_plateaus_and_norms_continue(tmp_path):
    def trained(name, *overrides):
        # As other programs, a run before it, or a process of its own would leave it.
        torch.seed()
        run_small(tmp_path, [*REGULARIZED, f"run.name={name}", *overrides])

    trained("whole", "train.epochs=3")
    trained("parts", "train.epochs=2")
    trained("parts", "train.epochs=3", "run.kernels=torch", "checkpoint.resume=auto")
    same_end(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
def test_no_checkpoint_before_its_lines_are_synced(tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(run_folder.os, "fsync", full)
        with pytest.raises(TrainingStoppedError, match=r"results cannot be written .No space left"):
            run_small(tmp_path, [])
    assert list((tmp_path / "small/checkpoints").iterdir()) == []
    run_small(tmp_path, ["checkpoint.resume=auto"])


@pytest.mark.slow
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
