"""`evaluate.calibrate`: the bias that makes the validation part's predictions add up."""

import json
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from stampede.engine.errors import InterruptedRunError
from stampede.engine.metrics import PartMetrics
from stampede.engine.training import evaluate as made_by
from stampede.engine.watching.stop import StopRequestedError
from stampede.settings import SettingsError
from support.jobs import lines, run_small, same_end, small_config
from support.predicting import scores
from support.ranks import run_ranks

CALIBRATED = ["evaluate.calibrate=true", "evaluate.metrics=[calibration]"]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([1.0, 30.0]))
def test_predictions_add_up_to_the_clicks(seed, weighted, scale):
    draw = np.random.default_rng(seed)
    logits = (scale * draw.normal(size=50)).astype(np.float32)
    labels = draw.integers(0, 2, 50)
    weights = (draw.random(50) if weighted else np.ones(50)).astype(np.float32)
    metrics = PartMetrics([])
    metrics.add(logits, labels, weights)
    by = metrics.intercept()
    predicted = weights @ expit(logits.astype(np.float64) + by)
    assert predicted == pytest.approx(weights.astype(np.float64) @ labels, rel=1e-6)


@pytest.mark.parametrize(
    "logits, labels, expected",
    [
        ([1, 2], [1, 1], 0),
        ([1, np.nan], [1, 0], 0),
        ([1, np.inf], [1, 0], 0),
        *(([value] * 3, [1, 0, 0], np.log(0.5) - value) for value in (0.1, -0.3, 7.7, 1e-3)),
    ],
)
def test_of_one_class_or_equal_or_diverged_logits(logits, labels, expected):
    metrics = PartMetrics([])
    metrics.add(np.float32(logits), np.array(labels), np.ones(len(labels), np.float32))
    assert metrics.intercept() == pytest.approx(expected, abs=1e-6)


@pytest.mark.wide
def test_the_model_keeps_it(tmp_path):
    run_small(tmp_path, [*CALIBRATED, "train.epochs=2", "run.name=with"])
    run_small(tmp_path, [*CALIBRATED[1:], "train.epochs=2", "run.name=without"])
    found = {name: json.loads((tmp_path / name / "summary.json").read_text())
             for name in ("with", "without")}  # fmt: skip
    assert found["with"]["validation"]["calibration"] == pytest.approx(1, abs=1e-5)
    assert abs(found["without"]["validation"]["calibration"] - 1) > 1e-3
    # Predicting scores with the bias of the checkpoint.
    predicted = scores(tmp_path / "with", ["@run"], tmp_path)["score"].mean()
    labels = scores(tmp_path / "with", ["@run"], tmp_path)["label"].mean()
    assert predicted / labels == pytest.approx(found["with"]["calibration"], rel=1e-5)


@pytest.mark.wide
def test_an_interrupted_evaluation_leaves_the_bias(tmp_path, monkeypatch):
    run_small(tmp_path, [*CALIBRATED, "train.epochs=2", "run.name=whole"])
    run_small(tmp_path, [*CALIBRATED, "train.epochs=1", "run.name=parts"])
    real = made_by.evaluate

    def evaluate(*given, **options):
        if len(seen := [*taken, given]) == 3:
            # The bias is set, and a checkpoint is written now.
            raise StopRequestedError(signal.SIGTERM)
        taken[:] = seen
        return real(*given, **options)

    taken = []
    monkeypatch.setattr(made_by, "evaluate", evaluate)
    again = [*CALIBRATED, "train.epochs=2", "run.name=parts", "checkpoint.resume=auto"]
    with pytest.raises(InterruptedRunError):
        run_small(tmp_path, again)
    monkeypatch.undo()
    run_small(tmp_path, again)
    same_end(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
def test_two_ranks_find_the_same(tmp_path):
    run_small(tmp_path, [*CALIBRATED, "run.name=one"])
    run_ranks(2, run_small, tmp_path, [*CALIBRATED, "run.name=two"], 2)
    one, two = ([line for line in lines(tmp_path / name) if line["kind"] == "evaluation"]
                for name in ("one", "two"))  # fmt: skip
    for mine, its in zip(one, two, strict=True):
        assert its["calibration"] == pytest.approx(mine["calibration"], rel=1e-5)
        assert its["logloss"] == pytest.approx(mine["logloss"], rel=1e-5)


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["evaluate.select_on=test"], "needs the validation part"),
        (["model.name=esmm"], "sets the bias"),
    ],
)
def test_what_it_cannot_calibrate_is_refused(tmp_path, overrides, said):
    with pytest.raises(SettingsError, match=rf"evaluate\.calibrate {said}.*write"):
        small_config(tmp_path, *CALIBRATED, *overrides)
