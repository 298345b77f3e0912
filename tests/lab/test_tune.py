"""A search by minutes: what it searches, what it writes, and that it goes on."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import optuna
import pytest
import yaml
from optuna.storages.journal import JournalFileBackend

from stampede import DataError, SettingsError, TrainingStoppedError, configuration, open_run
from stampede.lab import tune as module
from stampede.lab.search_space import Parameter, open_parameters
from stampede.lab.tune import _alone, _configured, _Limits, _Search, _work, main, tune
from stampede.lease import Lease
from stampede.stores import continued
from support.forked import START_METHOD
from support.movie_runs import job, prepare_movies
from support.object_store import BUCKET, object_store
from support.waiting import HANG


@pytest.fixture
def folder(tmp_path):
    prepare_movies(tmp_path)
    return tmp_path


def tuned(folder, *overrides, minutes=0.0, metric="both", **limits):
    """The configuration that a search writes, with the rates left to it."""
    left = ("preset", "optim.", "train.epochs", "run.dir")
    given = [*(one for one in job(folder) if not one.startswith(left)), *overrides]
    found = tune(folder / "movies.yaml", given, folder / "out", minutes, metric, **limits)
    return yaml.safe_load(found.read_text())


def test_without_time_the_configuration_stays(folder, capsys):
    found = tuned(folder, "optim.embedding.l2=0")
    assert found["train"] == {"batch_size": 64} and found["evaluate"]["metric"] == "both"
    assert "trials: 1, of which 0 cut short and 0 failed" in capsys.readouterr().out


@pytest.mark.wide
def test_a_search_in_a_store_goes_on_elsewhere(folder, monkeypatch, capsys):
    small = [one for one in job(folder) if not one.startswith("run.dir")]
    given = [str(folder / "movies.yaml"), *small, "--minutes", "0", "--out", f"{BUCKET}/tuned"]
    with object_store(folder / "here") as store:
        assert main(given) == 0
        written = store.cat_file(f"{BUCKET}/tuned/tuned.yaml")
        monkeypatch.setenv("STAMPEDE_STORES", str(folder / "elsewhere"))
        assert main(given) == 0
        assert store.cat_file(f"{BUCKET}/tuned/tuned.yaml") == written
        # The second search tried nothing.
        assert capsys.readouterr().out.count("trials: 1, of which 0 cut short and 0 failed") == 2
        (here,) = (folder / "elsewhere").rglob("tuned.yaml")
        assert here.read_bytes() == written
        # What is wrong is told of what the user wrote.
        assert main([*given, "optim.dense.lr=0.01"]) == 2
        said = capsys.readouterr().err
        assert f"error: {BUCKET}/tuned: was searched with another" in said
        assert str(folder / "elsewhere") not in said
        monkeypatch.setattr(Lease, "SECONDS", 0.2)
        with continued(f"{BUCKET}/tuned"):
            assert main(given) != 0
        assert f"{BUCKET}/tuned: is being written by process" in capsys.readouterr().err


@pytest.mark.slow
def test_the_best_trial_of_what_is_open_is_written_and_a_second_search_goes_on(folder, capsys):
    asked = {"minutes": 60, "metric": "logloss", "trials": 3, "workers": 1}
    found = tuned(folder, "model.name=wide_deep", **asked)
    study = trials_of(folder)
    assert len(study) == 3
    searched = {
        "recipe.table_lr", "recipe.dense_lr", "recipe.l2", "train.epochs", "model.dropout",
        "data.min_count",
    }  # fmt: skip
    assert all(set(trial.params) <= searched for trial in study)
    # After the first, each changes one key.
    first = study[0].params
    assert set(first) == searched
    for trial in study[1:]:
        assert len([key for key in first if trial.params[key] != first[key]]) == 1
    runs = {n: open_run(folder / f"out/trials/{n:04d}") for n in range(len(study))}
    losses = {n: run.metrics["validation"]["logloss"] for n, run in runs.items()}
    done = [trial for trial in study if trial.state.name == "COMPLETE"]
    assert all(trial.value == -losses[trial.number] for trial in done) and len(done) == 3
    best = min((trial.number for trial in done), key=losses.get)
    changed = {key: value for key, value in study[best].params.items() if value != first[key]}
    for key, value in changed.items():
        section = found
        for part in key.split("."):
            section = section[part]
        assert section == value
    assert configuration(found).model.name == "wide_deep"
    # Each trial chose its epoch by the metric of the search.
    assert {run.config.evaluate.metric for run in runs.values()} == {"logloss"}
    printed = capsys.readouterr().out.splitlines()
    table = printed.index(
        next(line for line in printed if "logloss" in line and "table lr" in line)
    )
    assert f"{losses[best]:.4f}" in printed[table + 1]
    assert all(len(line) <= 100 for line in printed[table : table + len(done) + 1])
    assert tuned(folder, "model.name=wide_deep", **asked) == found
    assert len(trials_of(folder)) == len(study)
    with pytest.raises(SettingsError, match="was searched with another configuration"):
        tuned(folder, "model.name=deepfm", **asked)


def test_trials_train_on_the_last_rows_and_the_best_configuration_on_all(folder):
    given = ["train.epochs=1", "train.batch_size=null"]
    found = tuned(folder, *given, rows=100)
    run = open_run(folder / "out/trials/0000")
    assert run.summary["rows"]["train"] == 100 and "train_rows" not in found["data"]
    # The recipe's choices for so many rows are not those for all.
    assert set(found.get("optim", {})) | set(found.get("recipe", {})) == set()
    with pytest.raises(SettingsError, match="was searched with another configuration"):
        tuned(folder, *given, rows=200)


@pytest.mark.wide
def test_a_trial_that_is_worse_than_half_of_the_others_is_cut_short(folder, monkeypatch):
    monkeypatch.setattr(module, "_in_processes", lambda _, __, given: _work(1, *given))
    tuned(folder, minutes=60, trials=8)
    study = trials_of(folder)
    cut = [trial for trial in study if trial.state.name == "PRUNED"]
    assert cut and all(len(trial.intermediate_values) >= 2 for trial in cut)
    for trial in cut:
        assert len(trial.intermediate_values) < trial.params["train.epochs"]
        lines = open_run(folder / f"out/trials/{trial.number:04d}").history
        scores = lines["validation_auc"] - lines["validation_logloss"]
        np.testing.assert_allclose(scores, list(trial.intermediate_values.values()), rtol=1e-12)


def search_of(folder, *overrides):
    left = [one for one in job(folder) if not one.startswith(("run.dir", "train.epochs"))]
    _, values = _configured(folder / "movies.yaml", [*left, *overrides], "auc", 1)
    (folder / "out/trials").mkdir(parents=True)
    return _Search(folder / "movies.yaml", values, folder / "out", "auc", 1)


@pytest.mark.wide
def test_a_trial_ends_with_its_epoch_when_the_time_is_over(folder):
    epochs = {"train.epochs": Parameter(choices=[100_000])}
    _work(1, search_of(folder), epochs, "deepfm", _Limits(time.time() + 3, 10))
    (*_, last) = trials_of(folder)
    assert last.state.name == "COMPLETE", last.user_attrs
    assert len(last.intermediate_values) < 100_000


def test_so_does_the_first_one_and_a_metric_that_the_user_sets_stays(folder):
    found = tuned(folder, "train.epochs=7", "evaluate.metric=auc")
    first = open_run(folder / "out/trials/0000")
    assert len(first.history) == 1
    assert found["evaluate"]["metric"] == first.config.evaluate.metric == "auc"


def test_a_mistake_that_is_corrected_does_not_bind_the_folder(folder):
    with pytest.raises(DataError, match="write the path of the click log"):
        tuned(folder, "data.path=nowhere.csv")
    with pytest.raises(SettingsError, match="every key that tune searches is set"):
        searched = ["optim.embedding.lr=0.01", "optim.embedding.l2=0", "optim.dense.lr=0.01"]
        others = ["train.epochs=1", "model.name=fm", "model.dropout=0", "data.min_count=1"]
        tuned(folder, *searched, *others)
    assert tuned(folder, "train.epochs=1")["train"]["epochs"] == 1
    with pytest.raises(SettingsError, match="was searched with another configuration"):
        tuned(folder, "train.epochs=2")


@pytest.mark.wide
@pytest.mark.parametrize("at", ["before it is told", "while it is told"])
def test_a_search_that_was_killed_after_its_first_trial_goes_on(folder, at):
    expected = tuned(folder)
    journal = folder / "out/search.log"
    if at == "before it is told":
        journal.unlink()
    else:
        lines = journal.read_text().splitlines(keepends=True)
        told = next(n for n, line in enumerate(lines) if '"auc"' in line)
        journal.write_text("".join(lines[:told]))
        assert [trial.state.name for trial in trials_of(folder)] == ["RUNNING"]
    assert tuned(folder) == expected
    (only,) = trials_of(folder)
    assert only.state.name == "COMPLETE"
    # Those of one changed key are waiting.
    assert len(load(folder).trials) > 10


def test_keys_of_a_run_that_do_not_concern_a_trial(folder):
    found = tuned(folder, "train.refit=true", "run.overwrite=true", "train.epochs=1")
    assert found["train"]["refit"] is True and found["run"]["overwrite"] is True
    assert not (folder / "out/trials/0000-selection").exists()


def test_another_search_in_the_folder_is_refused(folder):
    with _alone(folder), pytest.raises(SettingsError, match="another search writes here"):
        (folder / "out").symlink_to(folder)
        tuned(folder)


def searching(arguments):
    """The command, whose processes are forked: nothing that has threads was done here before."""
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method: fork
    sys.exit(main(arguments))


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_trains_on_after_a_signal(folder, number):
    """Its processes end with it: at once, or of a killed one with their epochs."""
    left = ("run.dir", "train.epochs", "optim.")
    given = [one for one in job(folder) if not one.startswith(left)]
    command = [str(folder / "movies.yaml"), *given, "--out", str(folder / "out")]
    # The first trial.
    assert main([*command, "--minutes", "0"]) == 0
    further = [*command, "--minutes", "60", "--workers", "2"]
    process = multiprocessing.get_context(START_METHOD).Process(target=searching, args=(further,))
    process.start()
    waited = time.monotonic()
    while not (folder / "out/trials/0002.log").exists():
        assert process.is_alive() and time.monotonic() - waited < HANG
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(process.pid, number)
    process.join(HANG)
    assert process.exitcode == (-number if number == signal.SIGKILL else 128 + number)
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() - waited < HANG
        time.sleep(0.1)
    # The same command goes on.
    before = len(trials_of(folder))
    assert main([*command, "--trials", "1"]) == 0
    assert len(trials_of(folder)) == before


def load(folder):
    journal = JournalFileBackend(str(folder / "out/search.log"))
    return optuna.load_study(study_name="tune", storage=optuna.storages.JournalStorage(journal))


def trials_of(folder):
    return [trial for trial in load(folder).trials if trial.state.name != "WAITING"]


def test_small_logs_are_searched_with_rates_that_fall_too(folder):
    tuned(folder, "preset=auto", "train.batch_size=16")
    (first,) = [path for path in (folder / "out/trials").iterdir() if path.is_dir()]
    first = open_run(first)
    assert first.config.optim.embedding.schedule.decay == "constant"
    searched = open_parameters({}, first)
    assert searched["train.epochs"].choices == [6, 20]
    assert searched["train.batch_size"].choices == [8, 16, 32]
    assert {0.01, 0.1} <= set(searched["model.init_std"].choices)
    assert "model.init_std" not in open_parameters({"model": {"init_std": 0.05}}, first)
    # 20 epochs of a larger log are no limit of that kind, nor are those of a part of it.
    large = mock.Mock(config=first.config, summary={"rows": {"train": 2_000_000}})
    searched = open_parameters({}, large)
    assert searched["recipe.epochs"].choices == (0.5, 1.0, 2.0) and "train.epochs" not in searched
    assert "train.batch_size" not in searched and "data.min_count" not in searched
    # The paper's values are searched themselves.
    paper = mock.Mock(config=configuration({"preset": "paper"}), summary=large.summary)
    searched = open_parameters({}, paper)
    assert searched["optim.dense.lr"].low == pytest.approx(0.3 * 8e-4)
    assert searched["train.epochs"].choices == [10, 20, 40]
    assert not any(key.startswith("recipe.") for key in searched)


# What the recipe chooses for a small log.
CHOSEN = {"train": {"epochs": 20, "batch_size": 256}, "model": {"name": "deepfm", "dropout": 0.2}}


def test_min_count_is_searched_where_a_field_leaves_it_open(tmp_path):
    schema = tmp_path / "schema.yaml"
    data = {"kind": "table", "path": "log.csv", "schema_file": str(schema)}

    def searched(ids, **changes):
        schema.write_text(f"label: y\nids: {ids}\n")
        config = configuration({**CHOSEN, "data": {**data, **changes}})
        first = mock.Mock(config=config, summary={"rows": {"train": 20_000}})
        return open_parameters({"data": changes}, first).get("data.min_count")

    # Of so many rows the usual one is 2.
    assert searched("{a: {min_count: 3}, b: {}}").choices == [None, 1, 5]
    assert searched("{a: {min_count: 3}, b: {encode: hash, buckets: 9}}") is None
    assert searched("{a: {}}", features="paper") is None
    assert searched("{a: {}}", min_count=3) is None


def test_a_part_of_the_rows_is_no_small_log_for_the_batch(folder):
    given = [*job(folder), "train.batch_size=131072"]
    _, values = _configured(folder / "movies.yaml", given, "auc", 1, 1_000_000)
    assert values["data.train_rows"] == 13_107_200


def test_mistakes(folder, capsys):
    with pytest.raises(SettingsError, match="tune chooses by the validation part"):
        tuned(folder, "data.validation_fraction=0", "evaluate.select_on=test")
    with pytest.raises(TrainingStoppedError, match="the loss is"):
        tuned(folder, "optim.dense.lr=1e38", "optim.dense.schedule.warmup=0")
    with pytest.raises(SystemExit):
        main([str(folder / "movies.yaml"), "--minutes", "-1"])
    with pytest.raises(SystemExit):
        main([str(folder / "movies.yaml"), "--rows", "5000"])
    (folder / "text.yaml").write_text("data: foo")
    assert main([str(folder / "text.yaml"), "data.kind=table"]) == 2
    assert "data: found 'foo'" in capsys.readouterr().err
    assert main([str(folder / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
