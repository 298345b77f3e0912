"""Metrics against scikit-learn, pandas and TorchRec: ties, weights, groups, any pieces."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score
from torchrec.metrics.calibration import compute_calibration
from torchrec.metrics.ne import compute_cross_entropy, compute_ne

from stampede.engine import metrics
from stampede.engine.metrics import PartMetrics

FURTHER = ["pr_auc", "normalized_entropy", "calibration", "calibration_buckets"]


def drawn(rows, weighted, seed=0):
    """Logits (with ties), labels, weights, groups and true probabilities."""
    draw = np.random.default_rng(seed)
    truth = draw.normal(-1, 1.5, rows).astype(np.float32)
    probability = (1 / (1 + np.exp(-truth))).astype(np.float32)
    labels = (draw.random(rows) < probability).astype(np.float32)
    logits = (truth + draw.standard_normal(rows)).astype(np.float32).round(2)
    weights = draw.integers(0, 5, rows) / 4 if weighted else np.ones(rows)
    groups = (draw.zipf(1.3, rows) % 300).astype(np.int64)
    return logits, labels, weights.astype(np.float32), groups, probability


def measured(samples, pieces=1, chosen=FURTHER, expected=0):
    found = PartMetrics(chosen, samples=expected)
    for rows in np.array_split(np.arange(len(samples[0])), pieces):
        found.add(*(column[rows] for column in samples))
    return found.result()


ROWS = st.lists(
    st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 5), st.integers(0, 2)),
    min_size=2,
    max_size=50,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(ROWS, st.booleans(), st.integers(1, 60), st.integers(1, 5), st.integers(0, 60))
def test_few_samples_with_many_ties_in_any_pieces(rows, weighted, chunk, pieces, announced):
    scores, labels, weights, groups = (np.array(column) for column in zip(*rows, strict=True))
    scores = scores.astype(np.float32) / 3
    weights = weights.astype(np.float32) / 4 if weighted else np.ones(len(scores), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "CHUNK", chunk)
        samples = scores, labels, weights, groups, scores
        found = measured(samples, min(pieces, len(rows)), expected=announced)
    if weights[labels].any() and weights[~labels].any():
        expected = roc_auc_score(labels, scores, sample_weight=weights)
        assert found["auc"] == found["attainable_auc"] == pytest.approx(expected, abs=1e-12)
    else:
        assert found["auc"] is None
    if weights[labels].any():
        expected = average_precision_score(labels, scores, sample_weight=weights)
        assert found["pr_auc"] == pytest.approx(expected, abs=1e-12)
    if weights.any():
        probability = 1 / (1 + np.exp(-scores.astype(np.float64)))
        expected = log_loss(labels, probability, sample_weight=weights, labels=[0, 1])
        assert found["logloss"] == pytest.approx(expected, rel=1e-9)
    expected = gauc_of(scores, labels, groups, weights)
    assert found["gauc"] == (None if expected is None else pytest.approx(expected, abs=1e-12))


def gauc_of(scores, labels, groups, weights):
    """By scikit-learn, group by group; None if no group has both classes."""
    weights, labels = weights.astype(np.float64), labels.astype(bool)
    total = impressions = 0.0
    for group in np.unique(groups):
        rows = (groups == group) & (weights > 0)
        if 0 < labels[rows].sum() < rows.sum():
            own = roc_auc_score(labels[rows], scores[rows], sample_weight=weights[rows])
            total += weights[rows].sum() * own
            impressions += weights[rows].sum()
    return total / impressions if impressions else None


def alone(scores, labels):
    """AUC and logloss without weights."""
    found = PartMetrics([])
    found.add(np.array(scores, np.float32), np.array(labels), np.ones(len(labels), np.float32))
    return found.result()


def test_extreme_scores():
    scores, labels = [0.0, -0.0, -np.inf, np.inf, 1e-45, -1e-45], [1, 0, 0, 1, 1, 0]
    assert alone(scores, labels)["auc"] == (2 * 3 + 2.5) / 9
    assert alone(np.negative(scores), labels)["auc"] == 0.5 / 9
    # What float32 does not tell apart is a tie.
    assert alone([1.0, 1.0 + 1e-9], [0, 1])["auc"] == 0.5
    # float32 rounds this probability to 1.
    assert alone([200.0], [0])["logloss"] == pytest.approx(200)
    for poison in (np.nan, np.inf):
        assert not np.isfinite(alone([0.0, poison], [1, 0])["logloss"])


@pytest.mark.parametrize("weighted", [False, True])
def test_many_samples_against_other_libraries(weighted, monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK", 1000)
    logits, labels, weights, _, truth = samples = drawn(30_000, weighted)
    # More than are expected.
    found = measured(samples, pieces=11, expected=29_000)
    expected = roc_auc_score(labels, truth, sample_weight=weights)
    assert found["attainable_auc"] == pytest.approx(expected, rel=1e-9)
    label, weight, logit = (column.astype(np.float64) for column in (labels, weights, logits))
    predicted = 1 / (1 + np.exp(-logit))
    of_torch = [torch.from_numpy(column) for column in (label, predicted, weight)]
    entropy = compute_cross_entropy(*of_torch, eta=1e-12).sum()
    clicks, total = (torch.tensor(of.sum()) for of in (weight * label, weight))
    by_torchrec = compute_ne(entropy, total, clicks, total - clicks, eta=1e-12)
    assert found["normalized_entropy"] == pytest.approx(float(by_torchrec), rel=1e-6)
    by_torchrec = compute_calibration(torch.tensor((weight * predicted).sum()), clicks)
    assert found["calibration"] == pytest.approx(float(by_torchrec), rel=1e-6)

    # Buckets hold equally many: the position of the first equal score, the highest first, decides.
    buckets = pd.DataFrame(found["calibration_buckets"])
    position = pd.Series(-logits).rank(method="min") - 1
    frame = pd.DataFrame({"samples": 1, "w": weight, "p": weight * predicted, "y": weight * label})
    sums = frame.groupby((position * 10 // 30_000).astype(int)).sum()[::-1]
    assert buckets["samples"].tolist() == sums["samples"].tolist() and len(buckets) == 10
    for name, of in (("mean_prediction", "p"), ("mean_label", "y")):
        np.testing.assert_allclose(buckets[name], sums[of] / sums["w"], rtol=1e-9)


def test_groups_of_one_class_and_unknown_groups_are_counted():
    logits = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], np.float32)
    labels = np.array([0, 1, 1, 1, 0, 1, 0, 1], np.float32)
    groups = np.array([3, 3, 8, 8, 9, 1, 1, 2])
    sums = PartMetrics([], unknown_groups=[2])
    sums.add(logits, labels, np.ones(8, np.float32), groups)
    found = sums.result()
    assert (found["gauc"], found["gauc_groups"], found["gauc_left_out"]) == (0.5, 2, 2)
    assert found["gauc_unknown_samples"] == 1 and found["samples"] == 8


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_leaves_metrics_undefined(label):
    logits, _, weights, groups, truth = drawn(100, False)
    found = measured((logits, np.full(100, label, np.float32), weights, groups, truth))
    for name in ("auc", "attainable_auc", "normalized_entropy", "gauc"):
        assert found[name] is None, name
    assert (found["calibration"] is None) == (label == 0)
    assert (found["pr_auc"] is None) == (label == 0)
    assert found["logloss"] > 0 and found["gauc_groups"] == 0


def test_weights_in_only_some_of_the_pieces_count():
    logits, labels, weights, groups, truth = drawn(1000, False)
    weights[:500] = np.random.default_rng(1).integers(0, 3, 500)
    found = measured((logits, labels, weights, groups, truth), pieces=2)
    expected = roc_auc_score(labels, logits, sample_weight=weights)
    assert found["auc"] == pytest.approx(expected, abs=1e-12)
