"""The metrics of samples that are all in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stampede.engine.metrics.distinct import Scores, distinct_scores
from stampede.engine.metrics.grouped import GroupedSums
from stampede.engine.metrics.keys import pack
from stampede.engine.metrics.loss import LossSums
from stampede.engine.metrics.ranking import RankingSums
from stampede.engine.metrics.records import Records


def auc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Exact area under the ROC curve: the chance that a positive scores above a negative.

    Args:
        scores: `[n]`, compared as float32; ties count half.
        labels: `[n]`, 0 or 1.
        weights: `[n]`, taken as float32, not negative.

    Returns:
        NaN where one class is absent, or has no weight.
    """
    return _ranking(scores, labels, weights).auc


def average_precision(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> float:
    """Area under the precision-recall curve (PR-AUC); arguments as `auc`'s.

    Returns:
        NaN where no sample is positive.
    """
    return _ranking(scores, labels, weights).average_precision


def gauc(
    scores: np.ndarray, labels: np.ndarray, groups: np.ndarray, weights: np.ndarray | None = None
) -> float:
    """Mean AUC of groups weighted by their samples; other arguments as `auc`'s.

    Args:
        groups: `[n]` integers, not negative.

    Returns:
        NaN where every group has one class only.
    """
    sums = GroupedSums()
    for some in _distinct(scores, labels, weights, groups):
        sums.add(some)
    return sums.finish()


def logloss(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Mean binary cross-entropy, natural logarithm, in float64.

    Args:
        logits: `[n]`.
        labels: `[n]`, 0 or 1.
        weights: `[n]`, not negative.

    Returns:
        NaN where no sample has a weight.
    """
    sums = LossSums()
    sums.add(logits, labels, np.ones(len(logits)) if weights is None else weights)
    return sums.logloss


def _ranking(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None) -> RankingSums:
    sums = RankingSums()
    for some in _distinct(scores, labels, weights):
        sums.add(some)
    return sums


def _distinct(
    scores: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None,
    *groups: np.ndarray,
) -> Iterator[Scores]:
    records = [*(np.asarray(group).astype(np.uint64) for group in groups)]
    records = np.stack([*records, pack(scores, labels, weights)])
    kept = Records(*records.shape)
    kept.add(records)
    return distinct_scores(kept.sorted(), weights is not None)
