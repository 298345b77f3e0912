"""`evaluate.calibrate`: scale and shift of the logits, by the validation part."""

import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit
from sklearn.metrics import log_loss
from torch.nn import functional

from stampede import open_run
from stampede.engine import metrics
from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest
from stampede.engine.errors import InterruptedRunError
from stampede.engine.inference.export_command import main as export
from stampede.engine.metrics import PartMetrics
from stampede.engine.training import evaluate as made_by
from stampede.engine.watching.stop import StopRequestedError
from stampede.models import CTRModel
from stampede.settings import SettingsError
from support.jobs import lines, run_small, same_end, small_config
from support.packages import loaded, open_test_part
from support.predicting import run_command, scores
from support.ranks import run_ranks

CALIBRATED = ["evaluate.calibrate=true", "evaluate.metrics=[calibration]"]


def drawn(seed, weighted, scale):
    """Logits that are `scale` times those that the labels of 300 samples were drawn with."""
    draw = np.random.default_rng(seed)
    truth = draw.normal(-1.0, 1.5, 300)
    labels = (draw.random(300) < expit(truth)).astype(np.float32)
    weights = (draw.random(300) if weighted else np.ones(300)).astype(np.float32)
    return (scale * truth).astype(np.float32), labels, weights


def calibration(logits, labels, weights, **options):
    part = PartMetrics([])
    part.add(logits, labels, weights)
    return part.calibration(**options)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([0.5, 1.0, 1.5, 30.0]))
def test_no_other_scale_has_a_lower_loss(seed, weighted, by):
    logits, labels, weights = drawn(seed, weighted, by)
    scale, shift = calibration(logits, labels, weights)
    share = logit(np.average(labels, weights=weights))

    def loss(scale):
        moved = torch.tensor(share + scale * (logits - share))
        given = torch.tensor(labels).double(), torch.tensor(weights)
        return functional.binary_cross_entropy_with_logits(moved.double(), *given).item()

    assert 0.1 <= scale <= 1 and shift == pytest.approx((1 - scale) * share)
    others = np.linspace(0.1, 1.0, 181)
    assert min(map(loss, others)) > loss(scale) - 1.1e-4 * weights.mean()
    # Logits that are not certain enough stay, but for chance.
    assert scale > 0.6 if by == 0.5 else by < 30 or scale == 0.1


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([1.0, 30.0]))
def test_predictions_add_up_to_the_clicks(seed, weighted, by):
    logits, labels, weights = drawn(seed, weighted, by)
    scale, shift = calibration(logits, labels, weights, adds_up=True)
    predicted = weights @ expit(scale * logits.astype(np.float64) + shift)
    assert predicted == pytest.approx(weights.astype(np.float64) @ labels, rel=1e-6)


def test_an_offset_is_shifted_and_not_scaled():
    logits, labels, weights = drawn(1, False, 1.0)
    scale, shift = calibration(logits + 2, labels, weights, adds_up=True)
    assert scale > 0.9
    moved = scale * (logits + 2.0) + shift
    assert log_loss(labels, expit(moved)) < log_loss(labels, expit(logits)) + 1e-3


def test_neighbouring_scores_are_taken_together(monkeypatch):
    draw = np.random.default_rng(2)
    truth = draw.normal(-1.0, 1.5, 40_000).astype(np.float32)
    labels = (draw.random(40_000) < expit(truth)).astype(np.float32)
    given = 1.5 * truth, labels, draw.random(40_000).astype(np.float32)
    expected = calibration(*given, adds_up=True)
    monkeypatch.setattr(metrics, "CHUNK", 8_000)
    monkeypatch.setattr(metrics, "_BINS", 500)
    assert calibration(*given, adds_up=True) == pytest.approx(expected, abs=1e-4)
    assert expected[0] == pytest.approx(1 / 1.5, abs=0.03)


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
    given = np.float32(logits), np.array(labels), np.ones(len(labels), np.float32)
    assert calibration(*given) == (1.0, 0.0) or expected
    assert calibration(*given, adds_up=True) == (1.0, pytest.approx(expected, abs=1e-6))


@pytest.mark.parametrize("goals", [["click"], ["click", "buy"]])
def test_a_model_scores_with_it_and_trains_without(goals):
    several = goals if len(goals) > 1 else []
    model = CTRModel("mmoe" if several else "deepfm", {"a": 5}, 1, 4, [8], 1, goals=several)
    model.front.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    given = torch.randn(6, model.front.columns.stored), torch.randn(6, 1)
    model.eval()
    before = model.logits(*given)
    pairs = [[0.5, 0.25], [0.125, -1.0]][: len(goals)]
    model.calibration.set(pairs)
    scales, shifts = torch.tensor(pairs).T
    expected = before * scales + shifts
    assert torch.equal(model.logits(*given), expected)
    assert torch.equal(model.train().logits(*given), before)
    assert not any("calibration" in name for name in model.state_dict())


# Two epochs, the second one with a rate at which it learns its rows by heart.
BY_HEART = [
    "evaluate.calibrate=auto",
    "train.epochs=2",
    "optim.embedding.lr=0.3",
    "optim.dense.lr=0.02",
]


@pytest.mark.slow
def test_the_run_and_all_that_score_with_it_keep_it(tmp_path, capsys):
    run_small(tmp_path, [*BY_HEART, "evaluate.calibrate=false", "run.name=without"])
    run_small(tmp_path, [*BY_HEART, "run.name=with"])
    without, found = (open_run(tmp_path / name).metrics for name in ("without", "with"))
    ((scale, shift),) = found["validation"]["logit_calibration"]
    assert 0.1 <= scale < 0.9
    said = capsys.readouterr().out
    assert said.count(f"calibrated      logits scaled by {scale:.2f}, see") == 1
    for part in ("validation", "test"):
        # The order of scores stays; float32 may join neighbours.
        assert found[part]["auc"] == pytest.approx(without[part]["auc"], abs=1e-4)
        assert found[part]["logloss"] < without[part]["logloss"] - 0.01
    assert "logit_calibration" not in without["validation"]
    ours = scores(tmp_path / "with", ["@run"], tmp_path)
    before = scores(tmp_path / "without", ["@run"], tmp_path)["score"].to_numpy()
    expected = expit(scale * logit(before) + shift)
    # float32 rounds scores near 1.
    near = (before > 1e-3) & (before < 1 - 1e-3)
    assert near.any() and ours["score"].to_numpy()[near] == pytest.approx(expected[near], abs=1e-4)
    logged = log_loss(ours["label"], ours["score"])
    assert logged == pytest.approx(found["test"]["logloss"], rel=1e-5)
    status, said = run_command(export, tmp_path / "with", tmp_path / "package")
    assert status == 0, said
    model, samples = loaded(tmp_path / "package"), open_test_part(tmp_path / "with")
    ids = {name: samples.ids[:, place].numpy() for place, name in enumerate(model.fields)}
    found = model.score_rows(ids, samples.dense.numpy())
    assert np.array_equal(found, ours["score"].to_numpy()[: len(found)])


@pytest.mark.slow
def test_a_continued_run_may_leave_it(tmp_path):
    def found(*overrides):
        run_small(tmp_path, [*BY_HEART, *overrides])
        return read_manifest(newest(tmp_path / "small/checkpoints")).progress.calibration

    ((scale, _),) = found("train.epochs=1")
    assert scale < 1
    assert found("evaluate.calibrate=false", "checkpoint.resume=auto") == []


@pytest.mark.slow
def test_predictions_of_a_run_add_up(tmp_path):
    run_small(tmp_path, [*CALIBRATED, "train.epochs=2", "run.name=with"])
    run_small(tmp_path, [*CALIBRATED[1:], "train.epochs=2", "run.name=without"])
    found, without = (open_run(tmp_path / name).metrics for name in ("with", "without"))
    assert found["validation"]["calibration"] == pytest.approx(1, abs=1e-5)
    assert abs(without["validation"]["calibration"] - 1) > 1e-3


@pytest.mark.wide
def test_an_interrupted_evaluation_leaves_the_calibration(tmp_path, monkeypatch):
    run_small(tmp_path, [*CALIBRATED, "train.epochs=2", "run.name=whole"])
    run_small(tmp_path, [*CALIBRATED, "train.epochs=1", "run.name=parts"])
    real = made_by.evaluate

    def evaluate(*given, **options):
        if len(seen := [*taken, given]) == 3:
            # The calibration is set, and a checkpoint is written now.
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
        (["model.name=esmm"], "shifts each score"),
    ],
)
def test_what_it_cannot_calibrate_is_refused(tmp_path, overrides, said):
    with pytest.raises(SettingsError, match=rf"evaluate\.calibrate {said}.*write"):
        small_config(tmp_path, *CALIBRATED, *overrides)
