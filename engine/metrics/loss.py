"""Logloss, normalized entropy and calibration of all samples together."""

from __future__ import annotations

import math

import numpy as np

from stampede.engine.metrics.calibration import probability


class LossSums:
    """Sums over samples, in float64."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._positive = 0.0
        self._loss = 0.0
        self._predicted = 0.0

    def add(self, logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> None:
        """Take samples: logits, labels 0 or 1, weights not negative, `[n]` each."""
        logits, labels, weights = (array.astype(np.float64) for array in (logits, labels, weights))
        # Of logits that are no numbers the trainer tells the user.
        with np.errstate(invalid="ignore"):
            losses = np.logaddexp(0.0, (1.0 - 2.0 * labels) * logits)
        self._weight += float(weights.sum())
        self._positive += float((weights * labels).sum())
        self._loss += float((weights * losses).sum())
        self._predicted += float((weights * probability(logits)).sum())

    @property
    def logloss(self) -> float:
        """Mean binary cross-entropy, natural logarithm; NaN where no sample has a weight."""
        return self._loss / self._weight if self._weight else float("nan")

    @property
    def normalized_entropy(self) -> float:
        """Logloss over the entropy of the share of clicks; NaN where one class is absent.

        "Practical Lessons from Predicting Clicks on Ads at Facebook" (ADKDD 2014), equation 1.
        """
        if not 0 < self._positive < self._weight:
            return float("nan")
        rate = self._positive / self._weight
        return self.logloss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))

    @property
    def calibration(self) -> float:
        """Mean prediction over mean label; NaN where there is no click."""
        return self._predicted / self._positive if self._positive else float("nan")
