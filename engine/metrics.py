"""Exact AUC and logloss."""

from __future__ import annotations

import numpy as np


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties half.

    Exact: counts pairs in integers.

    Args:
        scores: `[n]`.
        labels: `[n]`, 0 or 1.

    Returns:
        NaN where one class is absent.
    """
    _, group = np.unique(scores, return_inverse=True)
    samples = np.bincount(group)
    positives = np.bincount(group, weights=labels).astype(np.int64)
    negatives = samples - positives
    below = np.cumsum(negatives) - negatives
    pairs = int(positives.sum()) * int(negatives.sum())
    if pairs == 0:
        return float("nan")
    twice = int((positives * (2 * below + negatives)).sum())
    return twice / (2 * pairs)


def logloss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean binary cross-entropy, natural logarithm, in float64.

    Args:
        logits: `[n]`.
        labels: `[n]`, 0 or 1.
    """
    signed = logits.astype(np.float64) * (2.0 * labels.astype(np.float64) - 1.0)
    return float(np.logaddexp(0.0, -signed).mean())
