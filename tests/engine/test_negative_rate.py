"""A log that kept a share of its negatives: training as it is, scores for all rows."""

import math
import re
from unittest import mock

import numpy as np
import onnxruntime
import pandas as pd
import pytest
from sklearn.metrics import log_loss

from stampede import open_run, train
from stampede.data.samples import ClickShare
from stampede.engine.advice import on_calibration
from stampede.engine.api import configuration
from stampede.engine.checkpoint.retention import newest
from stampede.engine.inference.onnx_file import export_onnx
from stampede.engine.inference.packaging import export
from stampede.engine.inference.trained import open_trained
from stampede.engine.run import run as run_config
from support.goals import goal_config, goal_log, write_goals
from support.jobs import tensors_of
from support.movie_runs import prepare_movies, rows_of_test_part, train_on_movies
from support.movies import write_movies
from support.packages import loaded
from support.periods import period, write_job, write_log
from support.periods import train as train_periods
from support.predicting import predict, scores
from support.warm_starts import begun, movie_folder

RATE = 0.1
SAMPLED = [f"train.negative_rate={RATE}"]


def right(score):
    """The correction in float64."""
    return score / (score + (1 - score) / RATE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same training with and without the key."""
    folder = prepare_movies(tmp_path_factory.mktemp("movies"))
    plain = train_on_movies(folder, "run.name=plain", "train.epochs=2")
    return plain, train_on_movies(folder, "run.name=sampled", "train.epochs=2", *SAMPLED)


@pytest.mark.wide
def test_only_scores_differ(runs, tmp_path):
    plain, sampled = map(open_run, runs)
    assert plain.metrics == sampled.metrics
    frame = rows_of_test_part()
    expected = right(plain.score(frame))
    np.testing.assert_allclose(sampled.score(frame), expected, rtol=1e-6)
    found = scores(runs[1], ["@run"], tmp_path)["score"].to_numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    export(open_trained(runs[1]), tmp_path / "package", "fp32", overwrite=False)
    columns = frame.drop(columns=["rating", "importance"])
    np.testing.assert_allclose(loaded(tmp_path / "package").score(columns), expected, rtol=1e-5)


def test_metrics_of_raw_rows_are_those_of_the_scores(runs, tmp_path):
    """Rows to score are all rows; the run's own lack negatives, as its metrics do."""
    frame = rows_of_test_part()
    path = write_movies(tmp_path / "log.csv", frame)
    status, said = predict(runs[1], path, tmp_path / "a.csv")
    assert status == 0
    score = pd.read_csv(tmp_path / "a.csv")["score"]
    expected = log_loss(frame["rating"] >= 4, score, sample_weight=frame["importance"])
    assert re.search(f"logloss +{expected:.4f}", said), said
    told = "before the correction for train.negative_rate"
    assert told not in said
    status, said = predict(runs[1], "@run", tmp_path / "b.csv")
    expected = open_run(runs[1]).metrics["test"]["logloss"]
    assert re.search(f"logloss +{expected:.4f}", said) and told in said, said
    assert told not in predict(runs[0], "@run", tmp_path / "c.csv")[1]
    assert told not in predict(runs[1], "@run", "--ignore-label", tmp_path / "d.csv")[1]


@pytest.mark.wide
@pytest.mark.usefixtures("one_registry")
def test_several_goals(tmp_path):
    folder = write_goals(tmp_path)
    for name, settings in (("plain", []), ("sampled", SAMPLED)):
        given = [f"run.name={name}", "train.epochs=2", "model.options.experts=2", *settings]
        run_config(goal_config(folder, *given))
    frame = goal_log(50, seed=3)
    plain, found = (open_run(tmp_path / name).score(frame) for name in ("plain", "sampled"))
    expected = plain / (plain[:, :1] + (1 - plain[:, :1]) / RATE)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    trained = open_trained(tmp_path / "sampled")
    export(trained, tmp_path / "package", "fp32", overwrite=False)
    package = loaded(tmp_path / "package")
    columns = frame[["user", "item", "x"]]
    np.testing.assert_allclose(package.score(columns), expected, rtol=2e-5)
    export_onnx(trained, tmp_path / "model.onnx", "fp32", overwrite=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    named = {"user": np.array(frame["user"], object), "item": np.array(frame["item"], object)}
    outputs = [one.name for one in session.get_outputs()]
    assert outputs == ["probability_click", "probability_buy", "logit_click", "logit_buy"]
    given = session.run(None, {**named, "x": frame["x"].to_numpy(np.float64)})
    np.testing.assert_allclose(np.stack(given[:2], 1), expected, rtol=2e-5)


@pytest.mark.slow
def test_the_mean_score_is_the_click_rate_of_all_rows(tmp_path):
    """Clicks of a known model; the log keeps a tenth of the others."""
    draw, rows = np.random.default_rng(0), 60_000
    users, items = draw.integers(0, 40, rows), draw.integers(0, 40, rows)
    logits = draw.normal(size=40)[users] + draw.normal(size=40)[items] - 3
    truth = 1 / (1 + np.exp(-logits))
    frame = pd.DataFrame({"user": users, "item": items})
    frame["clicked"] = (draw.random(rows) < truth).astype(int)
    kept = (frame["clicked"] == 1) | (draw.random(rows) < RATE)
    whole = slice(50_000, None)
    frame[:50_000][kept[:50_000]].to_csv(tmp_path / "log.csv", index=False)
    (tmp_path / "schema.yaml").write_text("label: clicked\nids: [user, item]\n")
    run = train(
        data={
            "kind": "table",
            "path": str(tmp_path / "log.csv"),
            "schema_file": str(tmp_path / "schema.yaml"),
            "cache": str(tmp_path / "cache"),
            "split": "random",
        },
        model={"hidden": [16]},
        train={"negative_rate": RATE, "epochs": 6},
        evaluate={"compare_with_lr": False},
        run={"dir": str(tmp_path)},
    )
    found = run.score(frame[whole])
    assert found.mean() == pytest.approx(truth[whole].mean(), rel=0.05)
    # Without it they would be those of the rows that are left.
    before = found / (found + RATE * (1 - found))
    assert before.mean() > 3 * truth[whole].mean()
    assert log_loss(frame["clicked"][whole], found) < 1.05 * log_loss(
        frame["clicked"][whole], truth[whole]
    )
    # Of the rows that are left, the metrics of the run are right.
    assert run.metrics["test"]["calibration"] == pytest.approx(1, abs=0.1)
    assert not any("share of clicks" in text for text in run.summary["advice"])


@pytest.mark.slow
def test_a_warm_start_moves_the_bias(tmp_path):
    trained = train_on_movies(movie_folder(tmp_path / "old"), *SAMPLED)
    saved = tensors_of(newest(trained / "checkpoints"))["model.bias"].item()
    new = movie_folder(tmp_path / "new", 900)
    for name, settings, shift in (
        ("whole", [], math.log(RATE)),
        ("same", SAMPLED, 0.0),
        ("half", ["train.negative_rate=0.5"], math.log(RATE / 0.5)),
    ):
        given = [f"checkpoint.init_from={trained}", f"run.name={name}", *settings]
        path, told, _ = begun(new, given, name)
        bias = tensors_of(path)["model.bias"].item()
        assert bias == pytest.approx(saved + shift, abs=1e-6)
        (rate,) = [one.partition("=")[2] for one in settings] or ["1"]
        line = f"bias moved by {shift:.3f}, as train.negative_rate was {RATE} and is {rate}"
        assert [one for one in told if "bias" in one] == [line] * (shift != 0)


def test_a_job_that_goes_on_keeps_its_bias_when_the_key_is_added(runs):
    """As each period does: its log had that share all along."""
    saved = tensors_of(newest(runs[0] / "checkpoints"))["model.bias"].item()
    given = [f"checkpoint.init_from={runs[0]}", "checkpoint.init_state=all", "run.name=next"]
    path, told, _ = begun(runs[0].parent, [*given, *SAMPLED], "next")
    assert tensors_of(path)["model.bias"].item() == saved
    assert not any("bias" in line for line in told)


def test_advice():
    config = configuration()

    many = ClickShare(0.1, 1e6)

    def said(config, value, auc=0.7, clicks=many):
        return on_calibration(
            config, {"test": {"calibration": value, "auc": auc}}, lambda: [clicks]
        )

    for value, count in ((1.19, 0), (0.81, 0), (1.21, 1), (0.79, 1), (None, 0)):
        assert len(said(config, value)) == count
    # 90 of 900 rows are clicks. Four standard errors above 64 expected ones, or below 134.
    few = ClickShare(0.1, 900)
    for value, count in ((1.46, 0), (0.68, 0), (1.51, 1), (0.66, 1)):
        assert len(said(config, value, clicks=few)) == count
    # 15 where 75 are expected.
    assert said(config, 5.0, clicks=ClickShare(0.005, 3000))
    # It learned nothing.
    assert said(config, 2.0, auc=0.51) == said(config, 2.0, auc=None) == []
    (found,) = said(config, 9.6)
    assert "is 9.60 times the share of clicks" in found and "train.negative_rate; else" in found
    sampled = mock.Mock(train=mock.Mock(negative_rate=0.1))
    (found,) = said(sampled, 9.6)
    assert "metrics are those of uncorrected scores" in found
    goals = {name: {"calibration": value, "auc": 0.7} for name, value in (("a", 1.0), ("b", 2.0))}
    (found,) = on_calibration(config, {"test": {"goals": goals}}, lambda: [many, many])
    assert "is 2.00 for b times" in found and found.endswith(", or set evaluate.calibrate=true")
    assert "calibrate" not in said(configuration(evaluate={"calibrate": True}), 2.0)[0]
    assert "calibrate" not in said(configuration(evaluate={"select_on": "test"}), 2.0)[0]
    assert on_calibration(config, {"test": {}}, lambda: [many]) == []
    # The shares of clicks of the parts have told it already.
    moved = ["0.5 of the training rows ...: scores will be off by as much. If the rows are in time"]
    results = {"test": {"calibration": 9.6, "auc": 0.7}}
    assert on_calibration(config, results, lambda: [many], moved) == []


def test_the_key_is_above_0_and_at_most_1():
    for wrong in (0, 1.5, -1):
        with pytest.raises(Exception, match=r"train\.negative_rate: "):
            configuration(train={"negative_rate": wrong})


@pytest.mark.wide
def test_periods_and_their_packages(tmp_path):
    """Trained and scored on the files as they are; scores of new rows are for all rows."""
    found = []
    for name, settings in (("plain", []), ("sampled", SAMPLED)):
        folder = tmp_path / name
        path = write_job(folder)
        for number in (1, 2):
            write_log(folder / f"log{number}.csv", 10 * number, seed=number)
        train_periods(path, settings)
        run = period(folder, 2)
        export(open_trained(run), folder / "package", "fp32", overwrite=False)
        rows = pd.read_csv(folder / "log2.csv").drop(columns="click")
        score = open_run(run).score(rows)
        np.testing.assert_allclose(loaded(folder / "package").score(rows), score, rtol=1e-5)
        found.append((open_run(run).summary["auc"], score))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[1][1], right(found[0][1]), rtol=1e-6)
