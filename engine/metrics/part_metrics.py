"""All metrics of a part, from scores that come in piece by piece."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, Literal

import numpy as np

from stampede.engine.metrics.calibration import CalibrationBuckets
from stampede.engine.metrics.distinct import Scores, distinct_scores
from stampede.engine.metrics.grouped import GroupedSums
from stampede.engine.metrics.keys import pack
from stampede.engine.metrics.loss import LossSums
from stampede.engine.metrics.ranking import RankingSums
from stampede.engine.metrics.records import Records

Metric = Literal[
    "auc",
    "logloss",
    "pr_auc",
    "normalized_entropy",
    "calibration",
    "calibration_buckets",
    "gauc",
]


class PartMetrics:
    """Takes the samples of a part in any pieces; the metrics are exact.

    AUC and all else that is ranked does not depend on the pieces; sums such as logloss do, in their
    last bits.

    All scores are kept in memory, 8 bytes a sample and 8 more with true probabilities; groups take
    16 more, and 28 while they are sorted.

    Args:
        chosen: which; AUC and logloss are computed in any case.
        grouped: whether the samples have groups.
        with_truth: whether the samples have true probabilities.
        samples: how many will come, where that is known.
        unknown_groups: groups whose samples are left out of GAUC, as they are of several groups.

    Raises:
        MemoryError: there is not as much memory; also by the methods.
    """

    def __init__(
        self,
        chosen: Collection[Metric],
        *,
        grouped: bool = False,
        with_truth: bool = False,
        samples: int = 0,
        unknown_groups: Collection[int] = (),
    ) -> None:
        self._chosen = frozenset(chosen)
        columns = {"score": 1}
        if with_truth:
            columns["truth"] = 1
        if grouped:
            columns["group"] = 2
        self._records = {name: Records(count, samples) for name, count in columns.items()}
        self._loss = LossSums()
        self._samples = 0
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
        """Take samples.

        Args:
            logits, weights: `[n]` float32.
            labels: `[n]`, 0 or 1.
            groups: `[n]` integers, not negative.
            truth: `[n]` float32, the probabilities that the labels were drawn with.
        """
        self._samples += len(logits)
        # Without weights pairs are counted in integers.
        self._weighted = self._weighted or bool((weights != 1).any())
        self._loss.add(logits, labels, weights)
        keys = pack(logits, labels, weights)
        self._records["score"].add(keys[None])
        if groups is not None:
            self._add_groups(groups, keys)
        if truth is not None:
            self._records["truth"].add(pack(truth, labels, weights)[None])

    def _add_groups(self, groups: np.ndarray, keys: np.ndarray) -> None:
        unknown = np.isin(groups, self._unknown_groups)
        if unknown.any():
            self._unknown_samples += int(unknown.sum())
            groups, keys = groups[~unknown], keys[~unknown]
        self._records["group"].add(np.stack([groups.astype(np.uint64), keys]))

    def result(self) -> dict[str, Any]:
        """The metrics by name, once; None for what is undefined.

        `auc`, `logloss`, `attainable_auc` and `samples` are always there. With groups, so are
        `gauc`, `gauc_groups`, how many it is the mean of, `gauc_left_out`, groups that have one
        class only, and `gauc_unknown_samples`, those in `unknown_groups`. `calibration_buckets` is
        what `CalibrationBuckets.table` returns.
        """
        ranking, buckets = RankingSums(), CalibrationBuckets(self._samples)
        for scores in self._distinct("score"):
            ranking.add(scores)
            if "calibration_buckets" in self._chosen:
                buckets.add(scores)
        found = {
            "auc": ranking.auc,
            "logloss": self._loss.logloss,
            "attainable_auc": self._attainable(),
            "samples": self._samples,
        }
        further = {
            "pr_auc": lambda: ranking.average_precision,
            "normalized_entropy": lambda: self._loss.normalized_entropy,
            "calibration": lambda: self._loss.calibration,
            "calibration_buckets": buckets.table,
        }
        found |= {name: value() for name, value in further.items() if name in self._chosen}
        found |= self._grouped()
        # A logloss that is not finite is to be seen as what it is.
        return {
            name: None if name != "logloss" and _is_nan(value) else value
            for name, value in found.items()
        }

    def _attainable(self) -> float | None:
        if "truth" not in self._records:
            return None
        ranking = RankingSums()
        for scores in self._distinct("truth"):
            ranking.add(scores)
        return ranking.auc

    def _grouped(self) -> dict[str, float | int]:
        if "group" not in self._records:
            return {}
        sums = GroupedSums()
        for scores in self._distinct("group"):
            sums.add(scores)
        gauc = sums.finish()
        return {
            "gauc": gauc,
            "gauc_groups": sums.groups,
            "gauc_left_out": sums.left_out,
            "gauc_unknown_samples": self._unknown_samples,
        }

    def _distinct(self, name: str) -> Iterator[Scores]:
        return distinct_scores(self._records[name].sorted(), self._weighted)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
