"""Whole runs in this process: their files, refused settings, a loss that is not finite."""

import json
import os
import re
import time
from types import SimpleNamespace

import pytest

import stampede.engine.run as engine_run
from stampede.engine.config.load import load_config
from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.training import trainer
from stampede.optim import CowClipTables
from stampede.settings import SettingsError
from support.jobs import lines, run_small, small_config
from support.paths import ROOT, shared


@pytest.mark.slow
@pytest.mark.usefixtures("drawing")
def test_a_run_leaves_its_files(tmp_path, capsys):
    run_small(tmp_path, ["train.epochs=2", "evaluate.every=4"])
    run = tmp_path / "small"
    summary = json.loads((run / "summary.json").read_text())
    assert 0.5 < summary["auc"] < summary["attainable_auc"] < 1
    assert 0 < summary["clipped_share"] < 1
    assert summary["samples_per_second"] > 0 and summary["peak_memory_bytes"] > 0
    assert (summary["epochs"], summary["batch_size"], summary["world_size"]) == (2, 256, 1)
    curve = (run / "curve.png").read_bytes()
    assert curve.startswith(b"\x89PNG") and len(curve) > 10_000
    assert list((run / "tensorboard").glob("events*"))
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"epoch_0001", "epoch_0002"}
    kinds = [(line["kind"], line["step"]) for line in lines(run)]
    assert ("evaluation", 4) in kinds and ("evaluation", 8) in kinds
    assert kinds.count(("evaluation", 16)) == 2
    printed = capsys.readouterr().out
    assert re.search(r"embedding_l2 +1e-05 +x 0\.25 +2\.5e-06\n", printed)


@pytest.mark.slow
def test_training_time_includes_all_steps_and_those_that_rows_had_missed(tmp_path, monkeypatch):
    late = [0.0]

    def slower(owner, name, seconds):
        original = getattr(owner, name)

        def called(*given):
            late[0] += seconds
            return original(*given)

        monkeypatch.setattr(owner, name, called)

    slower(CowClipTables, "flush", 1e6)
    slower(trainer, "train_step", 1e3)
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0])
    monkeypatch.setattr("stampede.engine.training.trainer.time", clock)
    run_small(tmp_path, ["evaluate.every=3"])
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    least = 1e6 * 3 + 1e3 * summary["steps"]
    assert least <= summary["train_seconds"] < least + 1e3


@pytest.mark.slow
def test_an_existing_run_is_not_overwritten_silently(tmp_path, monkeypatch):
    run_small(tmp_path, [])
    metrics = tmp_path / "small/metrics.jsonl"
    before = metrics.read_bytes()
    with monkeypatch.context() as patch:
        # Before data are prepared.
        patch.setattr(engine_run, "open_dataset", None)
        with pytest.raises(RunFolderError, match=r"exists.*run.overwrite=true.*resume=auto"):
            run_small(tmp_path, [])
        with pytest.raises(RunFolderError, match=r"optim.embedding.l2: 1e-05 .* 0.5 now"):
            run_small(tmp_path, ["checkpoint.resume=auto", "optim.embedding.l2=0.5"])
    assert load_config(tmp_path / "small/config.yaml") == small_config(tmp_path)
    assert metrics.read_bytes() == before
    run_small(tmp_path, ["run.overwrite=true", "run.seed=1"])
    assert metrics.read_bytes() != before


@pytest.mark.slow
def test_a_folder_of_something_else_or_of_another_process_is_never_deleted(tmp_path):
    thesis = tmp_path / "other/thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with RunFolder(tmp_path / "small") as first:
        first.reserve(small_config(tmp_path))
        for override in ("run.overwrite=true", "checkpoint.resume=auto"):
            with pytest.raises(RunFolderError, match="not a run folder"):
                run_small(tmp_path, ["run.name=other", override])
            with pytest.raises(RunFolderError, match=rf"another run \(process {os.getpid()}\)"):
                run_small(tmp_path, [override])
    assert thesis.exists()
    run_small(tmp_path, [])


def test_reproducible_runs_say_where_products_may_differ(tmp_path, monkeypatch, capsys):
    run_small(tmp_path, ["train.reproducible=true"])
    assert "MKL_CBWR" not in capsys.readouterr().err
    # Of all tests' processes, see conftest.py.
    monkeypatch.delenv("MKL_CBWR")
    run_small(tmp_path, ["train.reproducible=true", "run.overwrite=true"])
    assert "start Python with MKL_CBWR=AUTO,STRICT in the environment" in capsys.readouterr().err


@pytest.mark.slow
def test_links_in_place_of_our_files_are_not_followed(tmp_path):
    victim = tmp_path / "theirs"
    victim.write_text("precious")
    lock, run = tmp_path / ".small.lock", tmp_path / "small"
    lock.symlink_to(victim)
    with pytest.raises(RunFolderError, match=r"\.small\.lock.* is a link|is a link, which is not"):
        run_small(tmp_path, [])
    lock.unlink()
    run_small(tmp_path, [])
    (run / "logs/rank_0.jsonl").unlink()
    (run / "logs").rmdir()
    (run / "logs").symlink_to(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(RunFolderError, match=r"is a link, which is not followed"):
        run_small(tmp_path, ["checkpoint.resume=auto", "train.epochs=2"])
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    (run / "logs").unlink()
    (run / "logs").mkdir()
    (run / "logs/rank_0.jsonl").symlink_to(victim)
    run_small(tmp_path, ["checkpoint.resume=auto", "train.epochs=2"])
    assert victim.read_text() == "precious"


@pytest.mark.slow
def test_the_best_epoch_is_chosen_on_the_asked_part(tmp_path, capsys):
    run_small(tmp_path, ["train.epochs=3", "evaluate.select_on=test", "optim.embedding.lr=0.05"])
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    every = [line for line in lines(tmp_path / "small") if line["kind"] == "evaluation"]
    assert {line["part"] for line in every} == {"test"} == {summary["selected_on"]}
    assert summary["best_auc"] == max(line["auc"] for line in every)
    assert every[summary["best_epoch"] - 1]["auc"] == summary["best_auc"]
    assert "itself, so optimistic" in capsys.readouterr().out


def test_weights_that_diverged_in_the_last_step_are_not_saved(tmp_path):
    with pytest.raises(TrainingStoppedError, match=r"logloss.*optim.dense.lr"):
        run_small(tmp_path, ["data.rows=256", "data.validation_fraction=0",
                             "evaluate.select_on=test", "optim.dense.lr=1e30",
                             "optim.dense.schedule.warmup=0"])  # fmt: skip
    assert list((tmp_path / "small/checkpoints").iterdir()) == []


def test_a_validation_part_without_rows_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"data.validation_fraction.*select_on=test"):
        run_small(tmp_path, ["data.rows=100", "data.validation_fraction=0.005"])


# Beside the test AUC of scikit-learn's logistic regression on hashed `column=value`, with the
# strength of its penalty chosen on the validation part; benchmarks/quality.py measures it anew.
@pytest.mark.parametrize(
    "config, file, network, theirs, margin",
    [
        pytest.param(
            *("criteo_kaggle", "criteo_kaggle_137k.tsv.gz", "deepfm", 0.7600, 0.002),
            marks=pytest.mark.soak,
        ),
        # Of 2,000 test rows: the AUC of one seed is within 0.002 of that of another.
        pytest.param(*("avazu", "avazu_20k.csv.gz", "lr", 0.7075, -0.002), marks=pytest.mark.wide),
    ],
)
def test_shipped_configurations_beside_scikit_learn(
    tmp_path, config, file, network, theirs, margin
):
    given = [f"data.path={shared(f'data/{file}')}", f"data.cache={tmp_path}", f"run.dir={tmp_path}"]
    # Layers of 400 give the same AUC to 0.0003 and take twice as long.
    network = [f"model.name={network}", "model.hidden=[128, 128]", "evaluate.compare_with_lr=false"]
    engine_run.run(load_config(ROOT / f"configs/{config}.yaml", [*given, *network]))
    ours = json.loads((tmp_path / config / "summary.json").read_text())["best_auc"]
    assert ours > theirs + margin


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_prints_what_reads_well_in_a_file_or_nothing(tmp_path, capfd, quiet):
    run_small(tmp_path, [f"run.quiet={str(quiet).lower()}", "train.batch_size=64"])
    told = capfd.readouterr()
    if quiet:
        assert told.out == told.err == ""
        assert (tmp_path / "small/summary.json").exists()
        return
    assert "\r" not in told.out + told.err
    lines = [line for line in told.err.splitlines() if line.startswith("training: ")]
    assert len(lines) == 10 and lines[-1].startswith("training: 100%, ")
    assert "epoch 1: validation AUC 0." in told.out
