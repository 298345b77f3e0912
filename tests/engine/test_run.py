"""Whole runs in this process: files, resume, refusals, a loss that is not finite."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from stampede.data import GlobalBatches
from stampede.engine import checkpoint
from stampede.engine.build import build
from stampede.engine.datasets import open_dataset
from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.processes import processes
from stampede.engine.step import train_step
from stampede.engine.tables import read_field
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
    from stampede.engine.config import load_config

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
    run_small(tmp_path, ["run.overwrite=true", "run.seed=1"])
    assert (tmp_path / "small/metrics.jsonl").read_bytes() != before


def test_a_folder_that_is_no_run_is_never_deleted(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small/thesis.txt").write_text("years of work")
    with pytest.raises(RunFolderError, match="not a run folder"):
        run_small(tmp_path, ["run.overwrite=true"])
    assert (tmp_path / "small/thesis.txt").exists()


def test_another_configuration_cannot_be_resumed(tmp_path):
    run_small(tmp_path, [])
    with pytest.raises(RunFolderError, match=r"optim.embedding.lr: 0.01 .* 0.5 now"):
        run_small(tmp_path, ["checkpoint.resume=auto", "optim.embedding.lr=0.5"])


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
            read = read_field(job.model, field, 6, here)
            assert read.embedding.shape == (rows, 6)
            assert read.first_order.shape == (rows, 1)
            assert 0.3 < read.embedding.std() < 0.7 or rows < 20
            assert read.first_order.abs().max() == 0


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    for name, whole in (("epoch_0002", True), ("epoch_0010", True), ("epoch_0011", False)):
        (tmp_path / name).mkdir()
        if whole:
            (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / ".epoch_0012.tmp").mkdir()
    assert checkpoint.newest(tmp_path).name == "epoch_0010"
