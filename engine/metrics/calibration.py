"""Whether predicted probabilities are those that clicks come with, by height of the prediction."""

from __future__ import annotations

from typing import Any

import numpy as np

from stampede.engine.metrics.distinct import Scores


class CalibrationBuckets:
    """Mean prediction and mean label in buckets of about equally many samples.

    Equal scores share a bucket, that of the first of them, so that it does not depend on the order
    of the samples; a bucket of which nothing is left does not exist.

    Args:
        samples: how many there are.
        buckets: into how many they are divided.
    """

    def __init__(self, samples: int, buckets: int = 10) -> None:
        self._samples = samples
        self._before = 0
        # Samples, weight, weighted predictions, weighted labels.
        self._sums = np.zeros((4, buckets))

    def add(self, scores: Scores) -> None:
        """Take further scores, logits, below those before."""
        buckets = self._sums.shape[1]
        position = self._before + np.cumsum(scores.samples) - scores.samples
        bucket = position * buckets // self._samples
        weight = (scores.positives + scores.negatives).astype(np.float64)
        for total, values in zip(
            self._sums,
            (scores.samples, weight, weight * probability(scores.score), scores.positives),
            strict=True,
        ):
            total += np.bincount(bucket, values, minlength=buckets)
        self._before += int(scores.samples.sum())

    def table(self) -> list[dict[str, Any]]:
        """Buckets of ascending predictions: `samples`, `mean_prediction`, `mean_label`."""
        return [
            {
                "samples": int(samples),
                "mean_prediction": float(predicted / weight),
                "mean_label": float(clicked / weight),
            }
            for samples, weight, predicted, clicked in self._sums.T[::-1]
            if weight > 0
        ]


def probability(logits: np.ndarray) -> np.ndarray:
    """The logistic function in float64, `[n]`."""
    # exp of nothing positive, which does not overflow.
    small = np.exp(-np.abs(logits.astype(np.float64)))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)
