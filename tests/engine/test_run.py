"""Whole runs in this process: their files, refused settings, a loss that is not finite."""

import json
import os
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import stampede.engine.run as engine_run
from stampede.data import GlobalBatches
from stampede.engine import trainer
from stampede.engine.config.load import load_config
from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.run_folder import RunFolder
from stampede.engine.step import send, train_step
from stampede.optim import CowClipTables, local_cowclip_tables
from stampede.settings import SettingsError
from support.checkpoints import small_job
from support.jobs import lines, run_small, small_config

SUMMARY = {
    "auc", "logloss", "best_auc", "attainable_auc", "samples_per_second", "train_seconds",
    "epochs", "batch_size", "world_size", "device", "peak_memory_bytes", "best_epoch",
}  # fmt: skip


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
    assert re.search(r"embedding_l2 +1e-05 +x 0\.25 +2\.5e-06\n", printed)
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 100


@pytest.mark.slow
def test_training_time_includes_all_steps_and_those_that_rows_had_missed(tmp_path, monkeypatch):
    late, flush, take_step = [0.0], CowClipTables.flush, trainer.train_step

    def slow_flush(tables):
        late[0] += 1e6
        flush(tables)

    def slow_step(*given):
        late[0] += 1e3
        return take_step(*given)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0])
    monkeypatch.setattr("stampede.engine.trainer.time", clock)
    monkeypatch.setattr(CowClipTables, "flush", slow_flush)
    monkeypatch.setattr(trainer, "train_step", slow_step)
    run_small(tmp_path, ["evaluate.every=3"])
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    least = 1e6 * 3 + 1e3 * summary["steps"]
    assert least <= summary["train_seconds"] < least + 1e3


def test_an_existing_run_is_not_overwritten_silently(tmp_path, monkeypatch):
    run_small(tmp_path, [])
    assert load_config(tmp_path / "small/config.yaml") == small_config(tmp_path)
    before = (tmp_path / "small/metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        # Before data are prepared.
        patch.setattr(engine_run, "open_dataset", None)
        with pytest.raises(RunFolderError, match=r"exists.*run.overwrite=true.*resume=auto"):
            run_small(tmp_path, [])
        with pytest.raises(RunFolderError, match=r"optim.embedding.l2: 1e-05 .* 0.5 now"):
            run_small(tmp_path, ["checkpoint.resume=auto", "optim.embedding.l2=0.5"])
    assert load_config(tmp_path / "small/config.yaml") == small_config(tmp_path)
    assert (tmp_path / "small/metrics.jsonl").read_bytes() == before
    with pytest.raises(SettingsError, match="only one of them"):
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


def test_the_best_epoch_is_chosen_on_the_asked_part(tmp_path, capsys):
    for part in ("validation", "test"):
        run_small(tmp_path, ["train.epochs=3", "run.overwrite=true", f"evaluate.select_on={part}",
                             "optim.embedding.lr=0.05"])  # fmt: skip
        summary = json.loads((tmp_path / "small/summary.json").read_text())
        every = [e for e in lines(tmp_path / "small") if e["kind"] == "evaluation"]
        chosen = [e["auc"] for e in every if e["part"] == part]
        tested = [e["auc"] for e in every if e["part"] == "test"]
        assert summary["best_epoch"] == int(np.argmax(chosen)) + 1
        assert summary["best_auc"] == tested[summary["best_epoch"] - 1]
        assert ("validation" in {e["part"] for e in every}) == (part == "validation")
        assert summary["selected_on"] == part
        assert ("itself, so optimistic" in capsys.readouterr().out) == (part == "test")


def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path):
    with small_job(tmp_path) as (here, job, _, dataset, _):
        batches = GlobalBatches(dataset.train, list(dataset.vocabulary_sizes), 256, 0, 1).epoch(0)
        train_step(job, send(next(batches), job.front, here.device), 1, here)
        batch = next(batches)
        batch.dense[3, 0] = float("nan")
        weights = [*job.dense_parameters.values()]
        weights += [tables.weights_tensor() for tables in local_cowclip_tables(job.model)]
        before = [values.detach().clone() for values in weights]
        with pytest.raises(TrainingStoppedError, match=r"step 2.*optim.dense.lr"):
            train_step(job, send(batch, job.front, here.device), 2, here)
        assert all(map(torch.equal, before, weights))


def test_weights_that_diverged_in_the_last_step_are_not_saved(tmp_path):
    with pytest.raises(TrainingStoppedError, match=r"logloss.*optim.dense.lr"):
        run_small(tmp_path, ["data.rows=256", "data.validation_fraction=0",
                             "evaluate.select_on=test", "optim.dense.lr=1e30",
                             "optim.dense.schedule.warmup=0"])  # fmt: skip
    assert list((tmp_path / "small/checkpoints").iterdir()) == []


def test_two_runs_do_not_write_one_folder(tmp_path):
    with RunFolder(tmp_path / "small") as first:
        first.reserve(small_config(tmp_path))
        for override in ("run.overwrite=true", "checkpoint.resume=auto"):
            with pytest.raises(RunFolderError, match=rf"another run \(process {os.getpid()}\)"):
                run_small(tmp_path, [override])
    run_small(tmp_path, [])


def test_a_validation_part_without_rows_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"data.validation_fraction.*select_on=test"):
        run_small(tmp_path, ["data.rows=100", "data.validation_fraction=0.005"])
