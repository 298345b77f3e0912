"""Exact metrics of predicted clicks, from samples that arrive in pieces.

A sample becomes a 64-bit key that sorts by score. Sorted keys become distinct scores with their
numbers of clicks and non-clicks, from which the ranking metrics are computed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

# Metrics of one number, and how they are shown.
METRICS = {
    "auc": "AUC",
    "logloss": "logloss",
    "pr_auc": "PR-AUC",
    "normalized_entropy": "norm. entropy",
    "calibration": "calibration",
    "gauc": "GAUC",
}
PARTS = ("validation", "test")

# Sorted samples per chunk, so that intermediate results stay in the caches.
CHUNK = 1 << 17

_LABEL = np.uint64(31)
_SCORE = np.uint64(32)
_BELOW_SCORE = np.uint64(0xFFFFFFFF)
_WEIGHT = np.uint64(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)
_BELOW_SIGN = np.uint32(0x7FFFFFFF)


class PartMetrics:
    """Computes exact metrics of a part whose samples arrive in pieces.

    Ranking metrics such as AUC do not depend on the pieces; sums such as logloss do, in their last
    bits.

    All scores are kept in memory: 8 bytes a sample, 8 more with true probabilities, and 16 more
    with groups (28 while sorting).

    Args:
        chosen: names of metrics; AUC and logloss are computed in any case.
        samples: how many will be added, if known.
        unknown_groups: those that stand for several real ones, such as rare ids; left out of GAUC.

    Attributes:
        samples: added so far.

    The methods raise MemoryError if there is not enough memory.
    """

    def __init__(
        self,
        chosen: Collection[str],
        *,
        samples: int = 0,
        unknown_groups: Collection[int] = (),
    ) -> None:
        self._chosen = frozenset(chosen)
        self._scores, self._truths = _Records(1, samples), _Records(1, samples)
        self._groups = _Records(2, samples)
        self._grouped = False
        self._loss = _LossSums()
        self.samples = 0
        self._weighted = False
        self._unknown_groups = np.array(list(unknown_groups), np.int64)
        self._unknown_samples = 0

    def add(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        weights: np.ndarray,
        groups: np.ndarray | None = None,
        truth: np.ndarray | None = None,
    ) -> None:
        """Add samples.

        Args:
            logits, weights: `[n]` float32.
            labels: `[n]`, 0 or 1.
            groups: `[n]` non-negative integers; in all pieces or in none.
            truth: `[n]` float32, the probabilities that the labels were drawn with; likewise.
        """
        self.samples += len(logits)
        # Without weights, pairs are counted as integers.
        self._weighted = self._weighted or bool((weights != 1).any())
        self._loss.add(logits, labels, weights)
        keys = _keys(logits, labels, weights)
        self._scores.add(keys[None])
        if groups is not None:
            self._grouped = True
            unknown = np.isin(groups, self._unknown_groups)
            self._unknown_samples += int(unknown.sum())
            groups, keys = groups[~unknown], keys[~unknown]
            self._groups.add(np.stack([groups.astype(np.uint64), keys]))
        if truth is not None:
            self._truths.add(_keys(truth, labels, weights)[None])

    def result(self) -> dict[str, Any]:
        """The metrics by name; None if undefined. Call it once.

        Always `auc`, `logloss`, `attainable_auc` and `samples`. With groups also `gauc`, the number
        `gauc_groups` of groups it averages, the number `gauc_left_out` of groups of one class, and
        the number `gauc_unknown_samples` of samples in `unknown_groups`.
        """
        ranking, truth = _RankingSums(), _RankingSums()
        buckets = _CalibrationBuckets(self.samples)
        for scores in self._scores.distinct(self._weighted):
            ranking.add(scores)
            if "calibration_buckets" in self._chosen:
                buckets.add(scores)
        for scores in self._truths.distinct(self._weighted):
            truth.add(scores)
        found = {
            "auc": ranking.auc,
            "logloss": self._loss.logloss,
            "attainable_auc": truth.auc,
            "samples": self.samples,
        }
        further = {
            "pr_auc": ranking.average_precision,
            "normalized_entropy": self._loss.normalized_entropy,
            "calibration": self._loss.calibration,
            "calibration_buckets": buckets.table(),
        }
        found |= {name: value for name, value in further.items() if name in self._chosen}
        if self._grouped:
            sums = _GroupedSums()
            for scores in self._groups.distinct(self._weighted):
                sums.add(scores)
            found |= {
                "gauc": sums.gauc,
                "gauc_groups": sums.groups,
                "gauc_left_out": sums.left_out,
                "gauc_unknown_samples": self._unknown_samples,
            }
        return found


def probability(logits: np.ndarray) -> np.ndarray:
    """The logistic function in float64, `[n]`."""
    # exp of a negative number cannot overflow.
    small = np.exp(-np.abs(logits.astype(np.float64)))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)


def _keys(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Keys of samples, `[n]` uint64, in the reverse order of their scores.

    From the highest bit on: 32 bits of the score as float32; the label; 31 bits of the weight as
    float32 without its sign. -0 counts as 0, and NaN as the highest score.
    """
    # Adding 0 turns -0 into +0.
    bits = (np.asarray(scores, np.float32) + np.float32(0)).view(np.uint32)
    keys = _reversed(bits).astype(np.uint64) << _SCORE
    keys |= labels.astype(np.uint64) << _LABEL
    weights = np.ascontiguousarray(weights, np.float32)
    keys |= weights.view(np.uint32).astype(np.uint64) & _WEIGHT
    return keys


def _reversed(bits: np.ndarray) -> np.ndarray:
    """Map float bits to integers in the reverse order of the floats, and back."""
    return np.where(bits & _SIGN, bits, bits ^ _BELOW_SIGN)


class _Scores(NamedTuple):
    """Distinct scores, of one group or of each group, the highest first.

    Attributes:
        group: `[n]` uint64, ascending; zeros if there are no groups.
        score: `[n]` float32.
        samples: `[n]` int64.
        positives, negatives: `[n]`, samples of each class: int64, or float64 sums of weights.
    """

    group: np.ndarray
    score: np.ndarray
    samples: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray


class _Records:
    """Keys of samples, or groups and keys (2 columns), kept in memory and sorted.

    Args:
        expected: number of records, if known, to avoid growing.
    """

    def __init__(self, columns: int, expected: int) -> None:
        self._array, self._expected = np.empty((columns, 0), np.uint64), expected
        self._held = 0

    def add(self, records: np.ndarray) -> None:
        """Add records, `[columns, n]` uint64."""
        held = self._held + records.shape[1]
        if held > self._array.shape[1]:
            size = max(held, self._expected, 2 * self._array.shape[1])
            grown = np.empty((len(records), size), np.uint64)
            grown[:, : self._held] = self._array[:, : self._held]
            self._array = grown
        self._array[:, self._held : held] = records
        self._held = held

    def distinct(self, weighted: bool) -> Iterator[_Scores]:
        """All scores in chunks; a score or a group is never split between chunks."""
        records = self._array[:, : self._held]
        if len(records) == 1:
            records[0].sort()
        else:
            order = np.lexsort(records[::-1])
            for column in records:
                column[:] = column[order]
            del order
        # Keep equal first columns together: all samples of a group or a score.
        first, same = records[0], np.uint64(0) if len(records) == 2 else _BELOW_SCORE
        start = 0
        while start < self._held:
            end = min(start + CHUNK, self._held)
            end = int(np.searchsorted(first, first[end - 1] | same, side="right"))
            yield _distinct(records[:, start:end], weighted)
            start = end


def _distinct(chunk: np.ndarray, weighted: bool) -> _Scores:
    keys = chunk[-1]
    order = (keys >> _SCORE).astype(np.uint32)
    label = (keys >> _LABEL) & np.uint64(1)
    groups = chunk[0] if len(chunk) == 2 else np.zeros_like(keys)
    is_first = np.ones(len(order), bool)
    is_first[1:] = (order[1:] != order[:-1]) | (groups[1:] != groups[:-1])
    starts = np.flatnonzero(is_first)
    samples = np.diff(starts, append=len(order))
    if weighted:
        weight = (keys & _WEIGHT).astype(np.uint32).view(np.float32).astype(np.float64)
        positives = np.add.reduceat(weight * label, starts)
        negatives = np.add.reduceat(weight * (1 - label), starts)
    else:
        positives = np.add.reduceat(label.view(np.int64), starts)
        negatives = samples - positives
    scores = _reversed(order[starts]).view(np.float32)
    return _Scores(groups[starts], scores, samples, positives, negatives)


class _RankingSums:
    """Counts pairs of a positive and a negative sample over descending distinct scores.

    Without weights it counts in integers, exactly. With weights it adds the product of a pair's
    weights in float64.
    """

    def __init__(self) -> None:
        self._positives: int | float = 0
        self._negatives: int | float = 0
        # Twice the pairs in which the positive scores higher; ties count once.
        self._twice: int | float = 0
        self._precisions = 0.0

    def add(self, scores: _Scores) -> None:
        """Add scores below all earlier ones."""
        positives, negatives = scores.positives, scores.negatives
        total_positives = positives.sum().item()
        total_negatives = negatives.sum().item()
        up_to = np.cumsum(positives)
        # int64 is wide enough for a chunk; totals are Python integers.
        within = (negatives * (2 * up_to - positives)).sum().item()
        self._twice += within + 2 * self._positives * total_negatives
        found = self._positives + up_to
        seen = found + (self._negatives + np.cumsum(negatives))
        precision = np.divide(found, seen, out=np.zeros(len(seen)), where=seen > 0)
        gained = positives * precision
        self._precisions += float(gained[:-1].sum()) + float(gained[-1])
        self._positives += total_positives
        self._negatives += total_negatives

    @property
    def auc(self) -> float | None:
        """Area under the ROC curve; None if one class is absent, or has no weight."""
        pairs = self._positives * self._negatives
        return self._twice / (2 * pairs) if pairs else None

    @property
    def average_precision(self) -> float | None:
        """Area under the precision-recall curve: the sum over scores of precision x recall gained.

        Like scikit-learn's `average_precision_score`; None without positive samples.
        """
        return self._precisions / self._positives if self._positives else None


class _GroupedSums:
    """GAUC: the mean AUC within groups, such as users, weighted by their impressions.

    `sum(impressions x AUC) / sum(impressions)`, after "Optimized Cost per Click in Taobao Display
    Advertising" (arXiv 1703.02091) and "Deep Interest Network" (arXiv 1706.06978). Groups with only
    one class have no AUC and are left out. With weights, impressions are sums of weights.

    Attributes:
        groups: groups with both classes so far.
        left_out: groups with one class so far.
    """

    def __init__(self) -> None:
        self.groups = 0
        self.left_out = 0
        self._impressions = 0.0
        self._weighted = 0.0

    def add(self, scores: _Scores) -> None:
        """Add complete groups; scores descend in each."""
        starts = np.flatnonzero(np.diff(scores.group, prepend=scores.group[:1] + np.uint64(1)))
        positives = np.add.reduceat(scores.positives, starts)
        negatives = np.add.reduceat(scores.negatives, starts)
        above = np.cumsum(scores.positives) - scores.positives
        above -= np.repeat(above[starts], np.diff(starts, append=len(above)))
        # Twice the pairs in which the positive scores higher; ties count once.
        twice = np.add.reduceat(scores.negatives * (2 * above + scores.positives), starts)
        both = (positives > 0) & (negatives > 0)
        self.groups += int(both.sum())
        self.left_out += int((~both).sum())
        positives, negatives, twice = positives[both], negatives[both], twice[both]
        impressions = (positives + negatives).astype(np.float64)
        self._impressions += float(impressions.sum())
        auc = twice / (2.0 * positives * negatives)
        self._weighted += float((impressions * auc).sum())

    @property
    def gauc(self) -> float | None:
        """The weighted mean; None if every group has only one class."""
        return self._weighted / self._impressions if self._impressions else None


class _LossSums:
    """Logloss, normalized entropy and calibration: sums over samples, in float64."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._positive = 0.0
        self._loss = 0.0
        self._predicted = 0.0

    def add(self, logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> None:
        """Add samples: logits, labels 0 or 1, non-negative weights, `[n]` each."""
        logits, labels, weights = (array.astype(np.float64) for array in (logits, labels, weights))
        # The trainer reports logits that are not finite.
        with np.errstate(invalid="ignore"):
            losses = np.logaddexp(0.0, (1.0 - 2.0 * labels) * logits)
        self._weight += float(weights.sum())
        self._positive += float((weights * labels).sum())
        self._loss += float((weights * losses).sum())
        self._predicted += float((weights * probability(logits)).sum())

    @property
    def logloss(self) -> float:
        """Mean binary cross-entropy, natural logarithm; NaN if no sample has a weight."""
        return self._loss / self._weight if self._weight else float("nan")

    @property
    def normalized_entropy(self) -> float | None:
        """Logloss over the entropy of the share of clicks; None if one class is absent.

        "Practical Lessons from Predicting Clicks on Ads at Facebook" (ADKDD 2014), equation 1.
        """
        if not 0 < self._positive < self._weight:
            return None
        rate = self._positive / self._weight
        return self.logloss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))

    @property
    def calibration(self) -> float | None:
        """Mean prediction over mean label; None without clicks."""
        return self._predicted / self._positive if self._positive else None


class _CalibrationBuckets:
    """Mean prediction and mean label in ten buckets of about equally many samples.

    Equal scores share the bucket of the first of them, so the order of samples does not matter.
    Empty buckets are left out.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._before = 0
        # Samples, weight, weighted predictions, weighted labels.
        self._sums = np.zeros((4, 10))

    def add(self, scores: _Scores) -> None:
        """Add scores (logits) below all earlier ones."""
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


def selected_metrics(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics of the selected epoch in a `summary.json`, by part."""
    test = {name: summary[name] for name in summary["last"]["test"]}
    validation = {"validation": summary["validation"]} if "validation" in summary else {}
    return {**validation, "test": test}
