"""Checkpoints, and runs that continue from them: after kills, full disks, changes."""

import json
import os
import re

import pytest
import torch

from stampede.engine import run_folder
from stampede.engine.checkpoint.retention import newest
from stampede.engine.errors import TrainingStoppedError
from support.jobs import run_small, without_times
from support.ranks import run_ranks
from support.warm_starts import tensors_of


@pytest.mark.slow
def test_resume_continues_as_if_nothing_had_happened(tmp_path, capsys):
    """From the newest whole checkpoint, whatever a kill or a damage left after it."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    run_small(whole, ["train.epochs=3"])
    run_small(parts, ["train.epochs=2"])
    # Steps done after the newest checkpoint, by a run that was then killed.
    with (parts / "small/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 17, "loss": 9.0}) + "\n")
        # As a file system may leave it after a power loss.
        file.write("\0" * 40 + "\n")
        file.write('{"kind": "tra')
    # As a kill while the folder was made leaves it.
    (parts / "small/.config.yaml.tmp").write_text("run:")
    next((parts / "small/checkpoints/epoch_0002").glob("*.distcp")).write_bytes(b"")
    run_small(parts, ["train.epochs=3", "checkpoint.resume=auto"])
    assert without_times(parts / "small") == without_times(whole / "small")
    printed = capsys.readouterr().out
    assert "epoch_0002: damaged checkpoint (" in printed and "epoch_0001 is used" in printed
    assert printed.count("new setting: ") == printed.count("train.epochs=3 (was 2)") == 1
    one, other = (json.loads((f / "small/summary.json").read_text()) for f in (whole, parts))
    for key in ("auc", "logloss", "best_auc", "best_epoch", "clipped_share", "steps"):
        assert one[key] == other[key]


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
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        # As other programs, a run before it, or a process of its own would leave it.
        torch.seed()
        arguments = [folder, [*REGULARIZED, *overrides], ranks]
        run_ranks(ranks, run_small, *arguments) if ranks > 1 else run_small(*arguments)
        return without_times(folder / "small"), tensors_of(newest(folder / "small/checkpoints"))

    whole = trained("whole", "train.epochs=3")
    trained("parts", "train.epochs=2")
    parts = trained("parts", "train.epochs=3", "checkpoint.resume=auto")
    assert parts[0] == whole[0]
    assert whole[1].keys() == parts[1].keys()
    assert all(torch.equal(tensor, parts[1][name]) for name, tensor in whole[1].items())


def test_no_checkpoint_before_its_lines_are_synced(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    fsync = os.fsync
    monkeypatch.setattr(run_folder.os, "fsync", full)
    with pytest.raises(TrainingStoppedError, match=r"results cannot be written .No space left"):
        run_small(tmp_path, [])
    assert list((tmp_path / "small/checkpoints").iterdir()) == []
    monkeypatch.setattr(run_folder.os, "fsync", fsync)
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
    assert len(re.findall(r"  AUC +undefined", printed)) == 2
    told = "epoch 2: the last one, as the AUC of the validation part is undefined"
    assert printed.count(told) == 2 and "best AUC" not in printed
