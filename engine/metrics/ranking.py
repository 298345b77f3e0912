"""Exact area under the ROC curve and average precision."""

from __future__ import annotations

import numpy as np

from stampede.engine.metrics.distinct import Scores


class RankingSums:
    """Pairs of a positive and a negative sample, counted over distinct scores that descend.

    Exact: in integers where there are no weights, else in float64; a pair then counts for the
    product of its weights.
    """

    def __init__(self) -> None:
        self._positives: int | float = 0
        self._negatives: int | float = 0
        # Twice the pairs in which the positive scores higher, ties once.
        self._twice: int | float = 0
        self._precisions = 0.0

    def add(self, scores: Scores) -> None:
        """Take further scores, below those before."""
        positives, negatives = scores.positives, scores.negatives
        total_positives = positives.sum().item()
        total_negatives = negatives.sum().item()
        up_to = np.cumsum(positives)
        # In a chunk int64 is wide enough; over all of them Python's integers are.
        within = (negatives * (2 * up_to - positives)).sum().item()
        self._twice += within + 2 * self._positives * total_negatives
        found = self._positives + up_to
        shown = found + (self._negatives + np.cumsum(negatives))
        precision = np.divide(found, shown, out=np.zeros(len(shown)), where=shown > 0)
        self._precisions += float((positives * precision).sum())
        self._positives += total_positives
        self._negatives += total_negatives

    @property
    def auc(self) -> float:
        """Area under the ROC curve: the chance that a positive scores above a negative, ties half.

        NaN where one class is absent, or has no weight.
        """
        pairs = self._positives * self._negatives
        return self._twice / (2 * pairs) if pairs else float("nan")

    @property
    def average_precision(self) -> float:
        """Area under the precision-recall curve: the sum over scores of precision x recall gained.

        As scikit-learn's `average_precision_score`; NaN where no sample is positive.
        """
        return self._precisions / self._positives if self._positives else float("nan")
