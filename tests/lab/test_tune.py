"""A search by minutes: what it searches, what it writes, and that it goes on."""

import time
from unittest import mock

import numpy as np
import optuna
import pytest
import yaml
from optuna.storages.journal import JournalFileBackend

from stampede import SettingsError, TrainingStoppedError, configuration, open_run
from stampede.lab.sweep import Parameter
from stampede.lab.tune import _begun, _Limits, _work, main, open_parameters, tune
from support.movie_runs import job, prepare_movies


@pytest.fixture
def folder(tmp_path):
    prepare_movies(tmp_path)
    return tmp_path


def tuned(folder, *overrides, minutes=0.0, metric="both", **limits):
    """The configuration that a search writes, with the rates left to it."""
    left = ("optim.", "train.epochs", "run.dir")
    given = [*(one for one in job(folder) if not one.startswith(left)), *overrides]
    found = tune(folder / "movies.yaml", given, folder / "out", minutes, metric, **limits)
    return yaml.safe_load(found.read_text())


def test_without_time_the_configuration_stays(folder, capsys):
    found = tuned(folder, "optim.embedding.l2=0")
    assert found["train"] == {"batch_size": 64} and found["evaluate"]["metric"] == "both"
    assert "1 trials on the validation part, 0 cut short, 0 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_the_best_trial_of_what_is_open_is_written_and_a_second_search_goes_on(folder, capsys):
    asked = {"minutes": 60, "metric": "logloss", "trials": 6}
    found = tuned(folder, "model.name=wide_deep", **asked)
    study = trials_of(folder)
    # Two processes may each begin one more.
    assert 6 <= len(study) <= 7
    searched = {
        "optim.embedding.lr", "optim.dense.lr", "optim.embedding.l2", "train.epochs",
        "model.dropout",
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
    assert all(trial.value == -losses[trial.number] for trial in done) and len(done) >= 4
    best = min((trial.number for trial in done), key=losses.get)
    for key, value in study[best].params.items() if best else ():
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


@pytest.mark.slow
def test_a_trial_that_is_worse_than_half_of_the_others_is_cut_short(folder):
    tuned(folder, minutes=60, trials=20, workers=1)
    study = trials_of(folder)
    cut = [trial for trial in study if trial.state.name == "PRUNED"]
    assert cut and all(len(trial.intermediate_values) >= 2 for trial in cut)
    for trial in cut:
        assert len(trial.intermediate_values) < trial.params["train.epochs"]
        lines = open_run(folder / f"out/trials/{trial.number:04d}").history
        scores = lines["validation_auc"] - lines["validation_logloss"]
        np.testing.assert_allclose(scores, list(trial.intermediate_values.values()), rtol=1e-12)


@pytest.mark.slow
def test_a_trial_ends_with_its_epoch_when_the_time_is_over(folder):
    left = [one for one in job(folder) if not one.startswith(("run.dir", "train.epochs"))]
    _, search = _begun(folder / "movies.yaml", left, folder / "out", "auc", 1)
    epochs = {"train.epochs": Parameter(choices=[100_000])}
    _work(1, search, epochs, "deepfm", _Limits(time.time() + 5, 10))
    (*_, last) = trials_of(folder)
    assert last.state.name == "COMPLETE", last.user_attrs
    assert len(last.intermediate_values) < 100_000


def trials_of(folder):
    journal = JournalFileBackend(str(folder / "out/search.log"))
    found = optuna.load_study(study_name="tune", storage=optuna.storages.JournalStorage(journal))
    return [trial for trial in found.trials if trial.state.name != "WAITING"]


def test_small_logs_are_searched_with_rates_that_fall_too(folder):
    tuned(folder, "preset=auto", "train.batch_size=16")
    (first,) = [path for path in (folder / "out/trials").iterdir() if path.is_dir()]
    first = open_run(first)
    assert first.config.optim.embedding.schedule.decay == "constant"
    searched = open_parameters({}, first)
    assert searched["train.epochs"].choices == [6, 20]
    assert searched["train.batch_size"].choices == [8, 16, 32]
    # 20 epochs of a larger log are no limit of that kind.
    large = mock.Mock(config=first.config, summary={"rows": {"train": 2_000_000}})
    assert open_parameters({}, large)["train.epochs"].choices == [20, 40, 80]


def test_a_metric_that_the_user_sets_stays(folder):
    assert tuned(folder, "evaluate.metric=auc")["evaluate"]["metric"] == "auc"
    (first,) = [path for path in (folder / "out/trials").iterdir() if path.is_dir()]
    assert open_run(first).config.evaluate.metric == "auc"


def test_mistakes(folder, capsys):
    with pytest.raises(SettingsError, match="tune chooses by the validation part"):
        tuned(folder, "data.validation_fraction=0", "evaluate.select_on=test")
    with pytest.raises(TrainingStoppedError, match="the loss is"):
        tuned(folder, "optim.dense.lr=1e38", "optim.dense.schedule.warmup=0")
    with pytest.raises(SystemExit):
        main([str(folder / "movies.yaml"), "--minutes", "-1"])
    (folder / "text.yaml").write_text("data: foo")
    assert main([str(folder / "text.yaml"), "data.kind=table"]) == 2
    assert "data: found 'foo'" in capsys.readouterr().err
    assert main([str(folder / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
