"""Exact metrics of predicted clicks, from samples that arrive in pieces.

A sample becomes a 64-bit key that sorts by score. Sorted keys become distinct scores with their
numbers of clicks and non-clicks, from which the ranking metrics are computed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
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

# Logits are scaled if that lowers the logloss by so much: it takes another pass over the rows.
_LEAST_GAIN = 1e-4
# With a smaller one float32 would make equal scores of different ones.
_LEAST_SCALE = 0.1
# Of neighbouring scores, for each `CHUNK` of samples, by which calibration is fitted.
_BINS = 1 << 12

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
    bits. All scores are kept in memory: 8 bytes a sample, 8 more with true probabilities, and 16
    more with groups (28 while sorting).

    Args:
        chosen: names of metrics; AUC and logloss are computed in any case.
        samples: how many will be added, if known.
        unknown_groups: those that stand for several real ones, such as rare ids; left out of GAUC.
    """

    def __init__(
        self, chosen: Collection[str], *, samples: int = 0, unknown_groups: Collection[int] = ()
    ) -> None:
        self._chosen = frozenset(chosen)
        self._scores, self._truths = _Records(1, samples), _Records(1, samples)
        self._groups = _Records(2, samples)
        self._grouped = self._weighted = self._soft = False
        self.samples = 0
        self._unknown_groups = np.array(list(unknown_groups), np.int64)
        self._unknown_samples = 0
        # Of weights; weighted labels, losses and predictions.
        self._sums = np.zeros(4)

    def add(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        weights: np.ndarray,
        groups: np.ndarray | None = None,
        truth: np.ndarray | None = None,
    ) -> None:
        """Add samples; groups and truth in all pieces or in none.

        Args:
            logits, weights: `[n]` float32.
            labels: `[n]`, 0 to 1. A soft one counts as a click and a non-click at once, with shares
                of the weight.
            groups: `[n]` non-negative integers.
            truth: `[n]` float32, the probabilities that the labels were drawn with.
        """
        self.samples += len(logits)
        if ((labels > 0) & (labels < 1)).any():
            self._soft = True
            taken, labels, weights = without_soft(labels, weights)
            logits, groups, truth = (
                None if one is None else one[taken] for one in (logits, groups, truth)
            )
        # Without weights, pairs are counted as integers.
        self._weighted = self._weighted or bool((weights != 1).any())
        keys = _keys(logits, labels, weights)
        self._scores.add(keys[None])
        if groups is not None:
            self._grouped = True
            known = ~np.isin(groups, self._unknown_groups)
            self._unknown_samples += int((~known).sum())
            self._groups.add(np.stack([groups[known].astype(np.uint64), keys[known]]))
        if truth is not None:
            self._truths.add(_keys(truth, labels, weights)[None])
        logits, labels, weights = (one.astype(np.float64) for one in (logits, labels, weights))
        # The trainer reports logits that are not finite.
        with np.errstate(invalid="ignore"):
            losses = np.logaddexp(0.0, (1.0 - 2.0 * labels) * logits)
        summed = (weights, weights * labels, weights * losses, weights * probability(logits))
        self._sums += [values.sum() for values in summed]

    def result(self) -> dict[str, Any]:
        """The metrics by name; None if undefined. Call it once.

        With groups also `gauc`, the number `gauc_groups` of groups it averages, `gauc_left_out` of
        groups of one class, and `gauc_unknown_samples` of samples in `unknown_groups`.
        """
        if self._soft:
            # Its buckets have equally many samples, which have one label each.
            self._chosen -= {"calibration_buckets"}
        weight, positive, loss, predicted = self._sums.tolist()
        logloss = loss / weight if weight else float("nan")
        buckets = np.zeros((4, 10)) if "calibration_buckets" in self._chosen else None
        scores, truths = (one.distinct(self._weighted) for one in (self._scores, self._truths))
        auc, average_precision = _ranking(scores, self.samples, buckets)
        found = {"auc": auc, "logloss": logloss, "attainable_auc": _ranking(truths)[0]}
        found["samples"] = self.samples
        further = {
            "pr_auc": average_precision,
            "normalized_entropy": None,
            "calibration": predicted / positive if positive else None,
        }
        if 0 < positive < weight:
            # "Practical Lessons from Predicting Clicks on Ads at Facebook", equation 1.
            rate = positive / weight
            entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
            further["normalized_entropy"] = logloss / entropy
        if buckets is not None:
            further["calibration_buckets"] = [
                {"samples": int(n), "mean_prediction": float(p / w), "mean_label": float(y / w)}
                for n, w, p, y in buckets.T[::-1]
                if w > 0
            ]
        found |= {name: value for name, value in further.items() if name in self._chosen}
        if self._grouped:
            found |= _gauc(self._groups.distinct(self._weighted))
            found["gauc_unknown_samples"] = self._unknown_samples
        return found

    def calibration(self, adds_up: bool = False) -> tuple[float, float]:
        """Scale and shift of all logits that lower the logloss, see `LogitCalibration`.

        The scale moves logits towards the log odds of the clicks, never away from them: a model
        that has learned its training rows by heart is too certain on others. It is 1 if the logloss
        would fall by less than 0.0001, and all stay as they are if one class is absent or a logit
        is not finite. Memory: 24 bytes for each of at most 1/32 of the samples, or 4,096.

        Args:
            adds_up: whether the shift makes the predictions add up to the clicks.
        """
        weight, positive, *_ = self._sums
        pieces = list(map(_in_bins, self._scores.distinct(self._weighted)))
        if not 0 < positive < weight:
            return 1.0, 0.0
        logits, clicks, others = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
        if not np.isfinite(logits).all():
            return 1.0, 0.0
        share, weights = math.log(positive / (weight - positive)), clicks + others
        offset = _intercept(logits, weights, positive, share) if adds_up else 0.0
        scale = _best_scale(logits + offset - share, clicks, others, share)
        shift = (1.0 - scale) * share + scale * offset
        if adds_up:
            shift += _intercept(scale * logits + shift, weights, positive, share)
        return scale, shift


def _in_bins(found: _Scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean logits of neighbours in at most `_BINS` bins, their clicks and others, float64."""
    count = len(found.score)
    starts = np.unique(np.linspace(0, count, min(count, _BINS), endpoint=False).astype(np.int64))
    clicks, others = (
        np.add.reduceat(one.astype(np.float64), starts)
        for one in (found.positives, found.negatives)
    )
    samples = found.samples * found.score.astype(np.float64)
    logits = np.add.reduceat(samples, starts) / np.add.reduceat(found.samples, starts)
    return logits, clicks, others


def _best_scale(away: np.ndarray, clicks: np.ndarray, others: np.ndarray, share: float) -> float:
    """From `_LEAST_SCALE` to 1, with the least loss of the logits `share + scale * away`."""
    # Slow to import.
    from scipy.optimize import brentq

    def slope(scale: float) -> float:
        return ((clicks + others) * probability(share + scale * away) - clicks) @ away

    def loss(scale: float) -> float:
        logits = share + scale * away
        return clicks @ np.logaddexp(0.0, -logits) + others @ np.logaddexp(0.0, logits)

    # The loss is convex.
    if slope(1.0) <= 0.0:
        return 1.0
    scale = _LEAST_SCALE
    if slope(scale) < 0.0:
        scale = float(brentq(slope, scale, 1.0))
    least = _LEAST_GAIN * (clicks.sum() + others.sum())
    return scale if loss(1.0) - loss(scale) >= least else 1.0


def _intercept(logits: np.ndarray, weights: np.ndarray, positive: float, share: float) -> float:
    """What to add to all logits so that predictions add up to the clicks."""
    from scipy.optimize import brentq

    # With the lowest logit at that of the share of clicks, all predictions are too high.
    low, high = share - logits.max(), share - logits.min()

    def excess(by: float) -> float:
        return weights @ probability(logits + by) - positive

    # Equal logits need no search; rounding may put the ends on one side.
    if excess(low) >= 0:
        return float(low)
    return float(high) if excess(high) <= 0 else float(brentq(excess, low, high))


# Metrics of which the mean over the goals of a model is one too.
_OVER_GOALS = ("auc", "logloss", "attainable_auc", "pr_auc", "normalized_entropy", "gauc")


def over_goals(found: dict[str, dict[str, Any]], weights: Mapping[str, float]) -> dict[str, Any]:
    """Metrics of a model with several goals: their weighted means, and `goals` with those of each.

    A mean is over the goals for which the metric is defined.

    Args:
        found: metrics of each goal, see `PartMetrics.result`.
        weights: of each goal, from 0.
    """
    means: dict[str, Any] = {}
    for name in {name: None for of_goal in found.values() for name in of_goal}:
        if name.removeprefix("new_ids_") not in _OVER_GOALS:
            continue
        values = {
            goal: of_goal[name]
            for goal, of_goal in found.items()
            if weights[goal] and of_goal.get(name) is not None and of_goal["samples"]
        }
        total = sum(weights[goal] for goal in values)
        mean = sum(weights[goal] * value for goal, value in values.items())
        means[name] = mean / total if values else None
    counts = {
        name: max(of_goal.get(name, 0) for of_goal in found.values())
        for name in ("samples", "new_ids_samples")
        if any(name in of_goal for of_goal in found.values())
    }
    return {**means, **counts, "goals": found}


def without_soft(
    labels: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples with labels 0 and 1 that have the same losses: a soft one becomes one of each.

    Returns:
        Which samples they are `[m]`, their labels `[m]`, and their shares of the weights `[m]`.
    """
    is_soft = (labels > 0) & (labels < 1)
    taken = np.append(np.arange(len(labels)), np.flatnonzero(is_soft))
    shares = np.append(np.where(is_soft, labels, 1), 1 - labels[is_soft])
    clicks = np.append(labels > 0, np.zeros(is_soft.sum(), bool))
    return taken, clicks, (weights[taken] * shares).astype(np.float32)


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
    """Distinct scores, of one group or of each group, the highest first; arrays of `[n]`."""

    # uint64, ascending; zeros if there are no groups.
    group: np.ndarray
    # float32
    score: np.ndarray
    # int64
    samples: np.ndarray
    # Samples of each class: int64, or float64 sums of weights.
    positives: np.ndarray
    negatives: np.ndarray


class _Records:
    """Keys of samples, or groups and keys (2 columns), kept in memory and sorted."""

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


def _ranking(
    chunks: Iterator[_Scores], samples: int = 0, buckets: np.ndarray | None = None
) -> tuple[float | None, float | None]:
    """AUC, and average precision like scikit-learn's `average_precision_score`; None if undefined.

    Without weights, pairs of a positive and a negative are counted as integers, exactly. With
    weights, the products of their weights are added in float64.

    Args:
        samples: in all chunks; needed for buckets.
        buckets: `[4, 10]`; samples, weights, weighted predictions and weighted labels are added.
            Buckets hold about equally many samples, by descending prediction. Equal scores share
            the bucket of the first of them, so the order of samples does not matter.
    """
    # int64 is wide enough for a chunk; totals are Python integers.
    positives: int | float = 0
    negatives: int | float = 0
    # Twice the pairs in which the positive scores higher; ties count once.
    twice: int | float = 0
    precisions, before = 0.0, 0
    for found in chunks:
        below, up_to = found.negatives.sum().item(), np.cumsum(found.positives)
        within = (found.negatives * (2 * up_to - found.positives)).sum().item()
        twice += within + 2 * positives * below
        clicks = positives + up_to
        seen = clicks + (negatives + np.cumsum(found.negatives))
        precision = np.divide(clicks, seen, out=np.zeros(len(seen)), where=seen > 0)
        gained = found.positives * precision
        precisions += float(gained[:-1].sum()) + float(gained[-1])
        positives += found.positives.sum().item()
        negatives += below
        if buckets is not None:
            position = before + np.cumsum(found.samples) - found.samples
            bucket = position * buckets.shape[1] // samples
            weight = (found.positives + found.negatives).astype(np.float64)
            each = found.samples, weight, weight * probability(found.score), found.positives
            for total, values in zip(buckets, each, strict=True):
                total += np.bincount(bucket, values, minlength=buckets.shape[1])
            before += int(found.samples.sum())
    pairs = positives * negatives
    return twice / (2 * pairs) if pairs else None, precisions / positives if positives else None


def _gauc(chunks: Iterator[_Scores]) -> dict[str, Any]:
    """GAUC: the mean AUC within groups, such as users, weighted by their impressions.

    `sum(impressions x AUC) / sum(impressions)`, after "Optimized Cost per Click in Taobao Display
    Advertising" (arXiv 1703.02091) and "Deep Interest Network" (arXiv 1706.06978). Groups with only
    one class have no AUC and are left out. With weights, impressions are sums of weights.
    """
    groups = left_out = 0
    total = weighted = 0.0
    for found in chunks:
        starts = np.flatnonzero(np.diff(found.group, prepend=found.group[:1] + np.uint64(1)))
        positives = np.add.reduceat(found.positives, starts)
        negatives = np.add.reduceat(found.negatives, starts)
        above = np.cumsum(found.positives) - found.positives
        above -= np.repeat(above[starts], np.diff(starts, append=len(above)))
        # Twice the pairs in which the positive scores higher; ties count once.
        twice = np.add.reduceat(found.negatives * (2 * above + found.positives), starts)
        both = (positives > 0) & (negatives > 0)
        groups += int(both.sum())
        left_out += int((~both).sum())
        positives, negatives, twice = positives[both], negatives[both], twice[both]
        impressions = (positives + negatives).astype(np.float64)
        total += float(impressions.sum())
        weighted += float((impressions * (twice / (2.0 * positives * negatives))).sum())
    gauc = weighted / total if total else None
    return {"gauc": gauc, "gauc_groups": groups, "gauc_left_out": left_out}


def selected_metrics(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics of the selected epoch in a `summary.json`, by part."""
    test = {name: summary[name] for name in summary["last"]["test"]}
    validation = {"validation": summary["validation"]} if "validation" in summary else {}
    return {**validation, "test": test}
