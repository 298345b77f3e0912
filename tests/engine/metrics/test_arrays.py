"""Metrics of samples in memory against scikit-learn, ties and weights among them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from stampede.engine.metrics import auc, average_precision, gauc, logloss


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=50))
def test_auc_with_many_ties(pairs):
    scores = np.array([score for score, _ in pairs], dtype=np.float32) / 3
    labels = np.array([label for _, label in pairs])
    if labels.all() or not labels.any():
        assert math.isnan(auc(scores, labels))
    else:
        assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    if labels.any():
        expected = average_precision_score(labels, scores)
        assert average_precision(scores, labels) == pytest.approx(expected, abs=1e-12)
    else:
        assert math.isnan(average_precision(scores, labels))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 5)), min_size=2, max_size=50
    )
)
def test_metrics_with_weights(rows):
    scores = np.array([score for score, _, _ in rows], dtype=np.float32) / 3
    labels = np.array([label for _, label, _ in rows])
    weights = np.array([weight for _, _, weight in rows], dtype=np.float32) / 4
    if weights[labels].any() and weights[~labels].any():
        expected = roc_auc_score(labels, scores, sample_weight=weights)
        assert auc(scores, labels, weights) == pytest.approx(expected, abs=1e-12)
    else:
        assert math.isnan(auc(scores, labels, weights))
    if weights[labels].any():
        expected = average_precision_score(labels, scores, sample_weight=weights)
        assert average_precision(scores, labels, weights) == pytest.approx(expected, abs=1e-12)
    if weights.any():
        probability = 1 / (1 + np.exp(-scores.astype(np.float64)))
        expected = log_loss(labels, probability, sample_weight=weights, labels=[0, 1])
        assert logloss(scores, labels, weights) == pytest.approx(expected, rel=1e-9)


def test_auc_of_many_weighted_samples():
    draw = np.random.default_rng(0)
    labels = draw.random(100_000) < 0.3
    scores = (draw.standard_normal(100_000) + labels).astype(np.float32).round(2)
    weights = draw.random(100_000).astype(np.float32)
    expected = roc_auc_score(labels, scores, sample_weight=weights)
    assert auc(scores, labels, weights) == pytest.approx(expected, abs=1e-9)


def test_auc_of_many_samples():
    draw = np.random.default_rng(0)
    labels = draw.random(200_000) < 0.3
    scores = (draw.standard_normal(200_000) + labels).astype(np.float32)
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_zeros_are_equal_and_infinities_are_the_ends():
    scores = np.array([0.0, -0.0, -np.inf, np.inf, 1e-45, -1e-45], np.float32)
    labels = np.array([1, 0, 0, 1, 1, 0])
    assert auc(scores, labels) == (2 * 3 + 2.5) / 9
    assert auc(-scores, labels) == 0.5 / 9


def test_what_float32_does_not_tell_apart_is_a_tie():
    assert auc(np.array([1.0, 1.0 + 1e-9]), np.array([0, 1])) == 0.5


@pytest.mark.parametrize("weighted", [False, True])
def test_gauc_is_the_mean_of_the_groups_by_impressions(weighted):
    draw = np.random.default_rng(0)
    groups = draw.zipf(1.3, 20_000) % 500
    labels = draw.random(20_000) < 0.2
    scores = (draw.standard_normal(20_000) + labels).astype(np.float32).round(1)
    weights = draw.integers(0, 4, 20_000).astype(np.float32) / 2 if weighted else None
    counted = np.ones(20_000) if weights is None else weights.astype(np.float64)
    total = impressions = 0.0
    for group in np.unique(groups):
        rows = (groups == group) & (counted > 0)
        if 0 < labels[rows].sum() < rows.sum():
            own = roc_auc_score(labels[rows], scores[rows], sample_weight=counted[rows])
            total += counted[rows].sum() * own
            impressions += counted[rows].sum()
    expected = total / impressions
    assert gauc(scores, labels, groups, weights) == pytest.approx(expected, abs=1e-12)
    assert abs(expected - auc(scores, labels, weights)) > 1e-4


def test_gauc_without_a_group_of_both_classes():
    assert math.isnan(gauc(np.arange(4.0), np.array([0, 0, 1, 1]), np.array([5, 5, 7, 7])))


def test_logloss():
    draw = np.random.default_rng(0)
    logits = (3 * draw.standard_normal(1000)).astype(np.float32)
    labels = draw.random(1000) < 0.5
    probability = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert logloss(logits, labels) == pytest.approx(log_loss(labels, probability), rel=1e-9)
    # Where a probability in float32 would be exactly 0 or 1.
    assert logloss(np.array([200.0]), np.array([0])) == pytest.approx(200)
