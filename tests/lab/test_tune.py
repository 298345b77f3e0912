"""A search by minutes: what it searches, what it writes, and that it goes on."""

from unittest import mock

import pytest
import yaml

from stampede import SettingsError, TrainingStoppedError, configuration, open_run
from stampede.lab import sweep
from stampede.lab import tune as tuning
from stampede.lab.tune import main, open_parameters, tune
from support.movie_runs import job, prepare_movies


@pytest.fixture
def folder(tmp_path):
    prepare_movies(tmp_path)
    return tmp_path


def tuned(folder, *overrides, minutes=0.0, metric="auc"):
    """The configuration that a search writes, with the rates left to it."""
    own = [one for one in job(folder) if not one.startswith(("optim.", "train.epochs", "run.dir"))]
    given = [*own, *overrides]
    return yaml.safe_load(
        tune(folder / "movies.yaml", given, folder / "out", minutes, metric).read_text()
    )


def test_without_time_the_configuration_stays(folder, capsys):
    found = tuned(folder, "optim.embedding.l2=0")
    assert found["train"] == {"batch_size": 64} and found["evaluate"]["metric"] == "auc"
    assert "1 trials on the validation part, 0 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_the_best_trial_of_what_is_open_is_written_and_a_second_search_goes_on(
    folder, monkeypatch, capsys
):
    trained, train = [], sweep.train

    def noted(config, **values):
        trained.append(values)
        return train(config, **values)

    monkeypatch.setattr(sweep, "train", noted)
    # The time does not end the search: how many trials fit into it depends on the machine.
    monkeypatch.setattr(tuning, "_MOST_TRIALS", 4)
    found = tuned(folder, "model.name=wide_deep", minutes=60, metric="logloss")
    assert len(trained) == 4
    searched = {key for key in trained[1] if key not in trained[0]}
    assert searched == {
        "optim.embedding.lr", "optim.dense.lr", "optim.embedding.l2", "train.epochs",
        "model.dropout",
    }  # fmt: skip
    runs = [open_run(path) for path in (folder / "out/trials").iterdir() if path.is_dir()]
    best = min(runs, key=lambda run: run.metrics["validation"]["logloss"])
    written = configuration(found)
    if best.path.name.startswith("0000"):
        assert "optim" not in found
    else:
        assert written.optim.embedding.lr == best.config.optim.embedding.lr
        assert written.train.epochs == best.config.train.epochs
    assert written.model.name == "wide_deep"
    # Each trial chose its epoch by the metric of the search.
    assert {run.config.evaluate.metric for run in runs} == {"logloss"}
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.endswith("as given") or "lr=" in line]
    assert f"{best.metrics['validation']['logloss']:.4f}" in rows[0]
    before = len(trained)
    assert tuned(folder, "model.name=wide_deep", metric="logloss") == found
    assert len(trained) == before


def test_small_logs_are_searched_with_rates_that_fall_too(folder):
    tuned(folder, "preset=auto", "train.batch_size=16")
    (first,) = [path for path in (folder / "out/trials").iterdir() if path.is_dir()]
    first = open_run(first)
    assert first.config.optim.embedding.schedule.decay == "constant"
    assert open_parameters({}, first)["train.epochs"].choices == [6, 20]
    # 20 epochs of a larger log are no limit of that kind.
    large = mock.Mock(config=first.config, summary={"rows": {"train": 2_000_000}})
    assert open_parameters({}, large)["train.epochs"].choices == [20, 40, 80]


def test_a_metric_that_the_user_sets_stays(folder):
    assert tuned(folder, "evaluate.metric=both")["evaluate"]["metric"] == "both"
    (first,) = [path for path in (folder / "out/trials").iterdir() if path.is_dir()]
    assert open_run(first).config.evaluate.metric == "both"


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
