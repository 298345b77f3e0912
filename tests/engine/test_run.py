"""Whole runs in this process: files, resume, refusals, a loss that is not finite."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from stampede.data import GlobalBatches
from stampede.engine import checkpoint, run_folder
from stampede.engine.build import build
from stampede.engine.config import load_config
from stampede.engine.datasets import open_dataset
from stampede.engine.errors import ConfigError, RunFolderError, TrainingStoppedError
from stampede.engine.processes import processes
from stampede.engine.step import train_step
from stampede.engine.tables import gather_field, read_field
from stampede.optim import local_cowclip_tables
from support.jobs import run_small, small_config

SUMMARY = {
    "auc", "logloss", "best_auc", "attainable_auc", "samples_per_second", "train_seconds",
    "epochs", "batch_size", "world_size", "device", "peak_memory_bytes", "best_epoch",
}  # fmt: skip


def lines(run: Path):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_times(run: Path):
    return [
        {key: value for key, value in line.items() if not key.endswith("_per_second")}
        for line in lines(run)
    ]


def test_a_run_leaves_its_files(tmp_path, capsys):
    run_small(tmp_path, ["train.epochs=2", "evaluate.every=4"])
    run = tmp_path / "small"
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert 0.5 < summary["auc"] < summary["attainable_auc"] < 1
    assert 0 < summary["clipped_share"] < 1
    assert (summary["epochs"], summary["batch_size"], summary["world_size"]) == (2, 256, 1)
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events*"))
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "epoch_0001", "epoch_0002",
    ]  # fmt: skip
    kinds = [(line["kind"], line["step"]) for line in lines(run)]
    assert ("evaluation", 4) in kinds and ("evaluation", 8) in kinds
    assert kinds.count(("evaluation", 16)) == 2
    printed = capsys.readouterr().out
    for word in ("attainable AUC", "samples/s", "peak memory", "curve.png", "rows clipped"):
        assert word in printed
    assert "embedding_l2 1e-05 -> 2.5e-06" in printed
    assert max(map(len, printed.splitlines())) <= 140


def test_the_config_file_reproduces_the_run(tmp_path):
    run_small(tmp_path, [])
    assert load_config(tmp_path / "small/config.yaml") == small_config(tmp_path)


def test_resume_continues_as_if_nothing_had_happened(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    run_small(whole, ["train.epochs=3"])
    run_small(parts, ["train.epochs=2"])
    # Steps done after the newest checkpoint, by a run that was then killed.
    with (parts / "small/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 17, "loss": 9.0}) + "\n")
        file.write('{"kind": "tra')
    run_small(parts, ["train.epochs=3", "checkpoint.resume=auto"])
    assert without_times(parts / "small") == without_times(whole / "small")
    one, other = (json.loads((f / "small/summary.json").read_text()) for f in (whole, parts))
    for key in ("auc", "logloss", "best_auc", "best_epoch", "clipped_share", "steps"):
        assert one[key] == other[key]


def test_resume_with_nothing_to_resume_starts(tmp_path):
    run_small(tmp_path, ["checkpoint.resume=auto"])
    assert (tmp_path / "small/summary.json").exists()


def test_an_existing_run_is_not_overwritten_silently(tmp_path):
    run_small(tmp_path, [])
    before = (tmp_path / "small/metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match=r"run.overwrite=true.*checkpoint.resume=auto"):
        run_small(tmp_path, [])
    assert (tmp_path / "small/metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match="only one of them"):
        run_small(tmp_path, ["run.overwrite=true", "checkpoint.resume=auto"])
    run_small(tmp_path, ["run.overwrite=true", "run.seed=1"])
    assert (tmp_path / "small/metrics.jsonl").read_bytes() != before


def test_a_folder_that_is_no_run_is_never_deleted(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small/thesis.txt").write_text("years of work")
    for override in ("run.overwrite=true", "checkpoint.resume=auto"):
        with pytest.raises(RunFolderError, match="not a run folder"):
            run_small(tmp_path, [override])
    assert (tmp_path / "small/thesis.txt").exists()


def test_another_configuration_cannot_be_resumed(tmp_path):
    run_small(tmp_path, [])
    with pytest.raises(RunFolderError, match=r"optim.embedding.l2: 1e-05 .* 0.5 now"):
        run_small(tmp_path, ["checkpoint.resume=auto", "optim.embedding.l2=0.5"])
    assert load_config(tmp_path / "small/config.yaml") == small_config(tmp_path)


def test_harmless_changes_are_listed(tmp_path, capsys):
    run_small(tmp_path, [])
    run_small(tmp_path, ["checkpoint.resume=auto", "train.epochs=2", "optim.dense.lr=1e-4"])
    printed = capsys.readouterr().out
    assert "changed since then: train.epochs: 1 in the checkpoint, 2 now" in printed
    assert "changed since then: optim.dense.lr: 0.001 in the checkpoint, 0.0001 now" in printed


def test_a_damaged_checkpoint_is_named(tmp_path):
    run_small(tmp_path, [])
    for shard in (tmp_path / "small/checkpoints/epoch_0001").glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(RunFolderError, match="damaged checkpoint"):
        run_small(tmp_path, ["checkpoint.resume=auto", "train.epochs=2"])


def test_old_checkpoints_go_but_the_best_stays(tmp_path):
    run_small(tmp_path, ["train.epochs=5", "checkpoint.keep=1", "optim.embedding.lr=0.1"])
    best = json.loads((tmp_path / "small/summary.json").read_text())["best_epoch"]
    names = {path.name for path in (tmp_path / "small/checkpoints").iterdir()}
    assert names == {f"epoch_{best:04d}", "epoch_0005"}


def test_a_checkpoint_names_its_columns(tmp_path):
    run_small(tmp_path, [])
    manifest = json.loads((tmp_path / "small/checkpoints/epoch_0001/manifest.json").read_text())
    table = manifest["tables"]["t_C1"]
    assert table["columns"] == {"embedding": [0, 10], "first_order": [10, 11], "padding": [11, 12]}


def test_the_best_epoch_is_chosen_on_the_asked_part(tmp_path):
    for part in ("validation", "test"):
        run_small(tmp_path, ["train.epochs=4", "run.overwrite=true", f"evaluate.select_on={part}",
                             "optim.embedding.lr=0.05"])  # fmt: skip
        summary = json.loads((tmp_path / "small/summary.json").read_text())
        every = [e for e in lines(tmp_path / "small") if e["kind"] == "evaluation"]
        chosen = [e["auc"] for e in every if e["part"] == part]
        tested = [e["auc"] for e in every if e["part"] == "test"]
        assert summary["best_epoch"] == int(np.argmax(chosen)) + 1
        assert summary["best_auc"] == tested[summary["best_epoch"] - 1]
        assert ("validation" in {e["part"] for e in every}) == (part == "validation")


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path, poison):
    config = small_config(tmp_path)
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        batches = GlobalBatches(dataset.train, list(dataset.vocabulary_sizes), 256, 0, 1).epoch(0)
        train_step(job, next(batches), 1, here)
        batch = next(batches)
        batch.dense[3, 0] = poison
        before = [
            *(p.detach().clone() for p in job.dense_parameters.values()),
            *(t.table.weights.clone() for t in local_cowclip_tables(job.model)),
        ]
        with pytest.raises(TrainingStoppedError, match=r"step 2.*optim.dense.lr"):
            train_step(job, batch, 2, here)
        after = [
            *job.dense_parameters.values(),
            *(t.table.weights for t in local_cowclip_tables(job.model)),
        ]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_tables_are_read_without_padding(tmp_path):
    config = small_config(tmp_path, "model.dim=6", "model.init_std=0.5")
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        for field, rows in list(dataset.vocabulary_sizes.items())[:3]:
            read = gather_field(job.model, field, 6, here)
            assert read.embedding.shape == (rows, 6)
            assert read.first_order.shape == (rows, 1)
            assert 0.3 < read.embedding.std() < 0.7 or rows < 20
            assert read.first_order.abs().max() == 0


def test_a_checkpoint_is_read_without_a_model(tmp_path):
    run_small(tmp_path, [])
    folder = tmp_path / "small/checkpoints/epoch_0001"
    config = small_config(tmp_path, "checkpoint.resume=auto")
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        checkpoint.load(folder, job, config, dataset)
        for field in ("C1", "C3"):
            gathered = gather_field(job.model, field, 10, here)
            for one, other in zip(read_field(folder, field), gathered, strict=True):
                assert torch.equal(one, other)
    with pytest.raises(RunFolderError, match=r"'C99'.*C1, C2"):
        read_field(folder, "C99")
    with pytest.raises(RunFolderError, match="no checkpoint"):
        read_field(tmp_path, "C1")


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path):
    run_small(tmp_path, [])
    whole = without_times(tmp_path / "small")
    shutil.rmtree(tmp_path / "small/checkpoints")
    with (tmp_path / "small/metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    run_small(tmp_path, ["checkpoint.resume=auto"])
    assert without_times(tmp_path / "small") == whole


def test_a_checkpoint_that_was_being_written_does_not_count(tmp_path):
    run_small(tmp_path, ["train.epochs=2"])
    folder = tmp_path / "small/checkpoints"
    whole = without_times(tmp_path / "small")
    # As after a kill: the second checkpoint lacks its last file and its name.
    (folder / "epoch_0002/manifest.json").unlink()
    (folder / "epoch_0002").rename(folder / ".epoch_0002.tmp")
    run_small(tmp_path, ["train.epochs=2", "checkpoint.resume=auto"])
    assert without_times(tmp_path / "small") == whole
    assert {path.name for path in folder.iterdir()} == {"epoch_0001", "epoch_0002"}


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    run_small(tmp_path, [])
    folder = tmp_path / "small/checkpoints"

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "to_json", full)
    with pytest.raises(TrainingStoppedError, match=r"epoch_0002.*No space left"):
        run_small(tmp_path, ["train.epochs=2", "checkpoint.resume=auto"])
    assert [path.name for path in folder.iterdir()] == ["epoch_0001"]
    monkeypatch.undo()
    monkeypatch.setattr(run_folder, "to_json", full)
    with pytest.raises(TrainingStoppedError, match="metrics cannot be written"):
        run_small(tmp_path, ["run.overwrite=true"])


def test_weights_that_diverged_in_the_last_step_are_not_saved(tmp_path):
    with pytest.raises(TrainingStoppedError, match=r"logloss.*optim.dense.lr"):
        run_small(tmp_path, ["data.rows=250", "evaluate.select_on=test", "optim.dense.lr=1e30",
                             "optim.dense.warmup_epochs=0"])  # fmt: skip
    assert list((tmp_path / "small/checkpoints").iterdir()) == []


def test_a_stop_is_logged(tmp_path):
    with pytest.raises(TrainingStoppedError):
        run_small(tmp_path, ["optim.dense.lr=1e38", "optim.dense.warmup_epochs=0"])
    last = lines(tmp_path / "small")[-1]
    assert last["kind"] == "stopped" and str(last["step"]) in last["reason"]


def test_a_validation_part_without_rows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data.validation_fraction.*select_on=test"):
        run_small(tmp_path, ["data.rows=100", "data.validation_fraction=0.005"])


def test_a_validation_part_of_one_class_gives_null(tmp_path):
    run_small(tmp_path, ["data.rows=100", "data.validation_fraction=0.01", "train.epochs=2"])
    text = (tmp_path / "small/metrics.jsonl").read_text()
    assert "NaN" not in text and '"auc": null' in text
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    assert summary["best_epoch"] == 2 and 0 < summary["best_auc"] < 1


def test_warmup_and_scaling_are_applied(tmp_path):
    run_small(tmp_path, ["train.log_every=1", "evaluate.select_on=test"])
    rates = [line["dense_lr"] for line in lines(tmp_path / "small") if line["kind"] == "train"]
    # 2000 rows, batches of 256: 7 whole ones, so 7 steps of warm-up; the rule divides lr by 2.
    target = 1e-3 * (256 / 1024) ** 0.5
    assert rates[0] == 1e-8
    assert rates[1:] == pytest.approx([target * step / 7 for step in range(1, 8)], rel=1e-3)


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    for name, whole in (("epoch_0002", True), ("epoch_0010", True), ("epoch_0011", False)):
        (tmp_path / name).mkdir()
        if whole:
            (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / ".epoch_0012.tmp").mkdir()
    assert checkpoint.newest(tmp_path).name == "epoch_0010"
