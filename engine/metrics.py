"""Exact AUC and logloss."""

from __future__ import annotations

import numpy as np


def auc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties half.

    Exact: counts pairs, in integers where there are no weights, else in float64; a pair then
    counts for the product of its weights.

    Args:
        scores: `[n]`.
        labels: `[n]`, 0 or 1.
        weights: `[n]`, not negative.

    Returns:
        NaN where one class is absent, or has no weight.
    """
    counted_in = np.int64 if weights is None else np.float64
    _, group = np.unique(scores, return_inverse=True)
    samples = np.bincount(group, weights).astype(counted_in)
    clicked = labels if weights is None else labels * weights.astype(np.float64)
    positives = np.bincount(group, clicked).astype(counted_in)
    negatives = samples - positives
    below = np.cumsum(negatives) - negatives
    pairs = positives.sum().item() * negatives.sum().item()
    if pairs == 0:
        return float("nan")
    twice = (positives * (2 * below + negatives)).sum().item()
    return twice / (2 * pairs)


def logloss(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Mean binary cross-entropy, natural logarithm, in float64.

    Args:
        logits: `[n]`.
        labels: `[n]`, 0 or 1.
        weights: `[n]`, not negative and not all 0.
    """
    signed = logits.astype(np.float64) * (2.0 * labels.astype(np.float64) - 1.0)
    losses = np.logaddexp(0.0, -signed)
    return float(np.average(losses, weights=weights))
