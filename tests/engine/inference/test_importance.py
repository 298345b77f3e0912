"""Permutation importance against shuffled frames, scored from raw values."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from stampede import DataError, SettingsError, open_run, train
from stampede.engine.inference.prediction import open_own_part
from stampede.engine.inference.trained import open_trained
from stampede.engine.run import run as train_goals
from support.goals import goal_config, write_goals
from support.movie_runs import prepare_movies, rows_of_test_part, train_on_movies

COLUMNS = ["user", "movie", "city", "slot", "age", "when", "genres"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = prepare_movies(tmp_path_factory.mktemp("movies"))
    return open_run(train_on_movies(folder, "train.epochs=3", "optim.dense.lr=0.02"))


def metrics(run, frame, label, weight):
    score = run.score(frame)
    auc = roc_auc_score(label, score, sample_weight=weight)
    return np.array([auc, log_loss(label, score, sample_weight=weight)])


@pytest.mark.wide
def test_each_column_against_shuffled_frames(run):
    """All inputs of a column move: a number and its bucket, several ids, parts of the time."""
    found = run.importance(repeats=3, seed=7)
    assert sorted(found.index) == sorted(COLUMNS) == sorted(found.attrs["columns"])
    frame = rows_of_test_part().reset_index(drop=True)
    known = frame["rating"] >= 4, frame["importance"]
    baseline = metrics(run, frame, *known)
    assert found.attrs["auc"] == pytest.approx(baseline[0], abs=1e-6)
    assert found.attrs["auc"] == pytest.approx(run.metrics["test"]["auc"], abs=1e-6)
    assert found.attrs["logloss"] == pytest.approx(baseline[1], abs=1e-6)
    for place, column in enumerate(found.attrs["columns"]):
        changes = []
        for repeat in range(3):
            order = np.random.default_rng([7, repeat, place]).permutation(len(frame))
            moved = frame.assign(**{column: frame[column].to_numpy()[order]})
            changes.append((metrics(run, moved, *known) - baseline) * [-1, 1])
        expected = np.stack([np.mean(changes, 0), np.std(changes, 0, ddof=1) / 3**0.5], 1).ravel()
        np.testing.assert_allclose(found.loc[column], expected, atol=2e-6)
    assert found["auc_lost"].abs().max() > 0.01 and found["auc_lost"].is_monotonic_decreasing


@pytest.mark.slow
def test_bounded_rows_seeds_and_parts(run):
    found = run.importance(rows=40, repeats=2)
    assert (found.attrs["rows"], found.attrs["of_rows"]) == (40, len(rows_of_test_part()))
    pd.testing.assert_frame_equal(found, run.importance(rows=40, repeats=2))
    assert not found.equals(run.importance(rows=40, repeats=2, seed=1))
    validation = run.importance(part="validation", repeats=2).attrs["auc"]
    assert validation == pytest.approx(run.metrics["validation"]["auc"], abs=1e-6)
    for wrong, said in (
        ({"rows": 1}, "rows: found 1; write a number of at least 2"),
        ({"repeats": 1}, "repeats: found 1"),
        ({"goal": "buy"}, "the run has one label; leave it out"),
    ):
        with pytest.raises(SettingsError, match=said):
            run.importance(**wrong)


@pytest.mark.slow
def test_of_a_goal(tmp_path):
    """The labels of a goal may be missing; without a name, the goal of the largest weight."""
    config = goal_config(write_goals(tmp_path), "evaluate.select_goals={click: 1, buy: 2}")
    train_goals(config)
    run = open_run(tmp_path / config.run.name)
    found = run.importance(repeats=2)
    assert found.attrs["goal"] == "buy" and set(found.index) == {"user", "item", "x"}
    for goal in ("buy", "click"):
        auc = run.importance(repeats=2, goal=goal).attrs["auc"]
        assert auc == pytest.approx(run.metrics["test"]["goals"][goal]["auc"], abs=1e-6)
    with pytest.raises(SettingsError, match="found 'click_'; write one of click, buy"):
        run.importance(goal="click_")


@pytest.mark.slow
def test_of_histories_and_synthetic_data(tmp_path):
    sizes = {"rows": 3000, "test_rows": 600}
    small = {"train": {"batch_size": 256, "epochs": 1}, "evaluate": {"compare_with_lr": False}}
    run = train(
        data={**sizes, "histories": "attention"},
        run={"dir": tmp_path, "name": "din"},
        **{**small, "model": {"hidden": [8], "name": "din"}},
    )
    found = run.importance(repeats=2)
    assert set(run.fields) <= set(found.index)
    assert found.attrs["auc"] == pytest.approx(run.metrics["test"]["auc"], abs=1e-6)
    with pytest.raises(DataError, match="clicks only or none: no AUC; write another --part"):
        run.importance(rows=2, repeats=2, seed=one_class_seed(run))


def one_class_seed(run):
    """A seed that draws two rows of one label."""
    part, _, _ = open_own_part(open_trained(run.path), "test")
    every = part.label(torch.arange(part.rows)).numpy()
    for seed in range(100):
        drawn = np.random.default_rng(seed).choice(len(every), 2, replace=False)
        if len(set(every[drawn].tolist())) == 1:
            return seed
    raise AssertionError
