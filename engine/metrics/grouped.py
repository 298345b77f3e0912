"""GAUC: the mean AUC within groups, such as users, weighted by their impressions."""

from __future__ import annotations

import numpy as np

from stampede.engine.metrics.distinct import Scores


class GroupedSums:
    """AUC of each group, over distinct scores that come group after group and descend in each.

    `sum(impressions x AUC) / sum(impressions)`, after "Optimized Cost per Click in Taobao Display
    Advertising" (arXiv 1703.02091) and "Deep Interest Network" (arXiv 1706.06978).
    Groups with one class only have no AUC and are left out. With weights, impressions are sums of
    weights.

    Attributes:
        groups: groups with both classes so far.
        left_out: groups with one class so far.
    """

    def __init__(self) -> None:
        self.groups = 0
        self.left_out = 0
        self._impressions = 0.0
        self._weighted = 0.0
        # Of the group that the next scores may go on with: name, positives, negatives, and twice
        # the pairs in which the positive scores higher, ties once.
        self._open: tuple[int, float, float, float] | None = None

    def add(self, scores: Scores) -> None:
        """Take further scores."""
        starts = np.flatnonzero(np.diff(scores.group, prepend=scores.group[:1] + np.uint64(1)))
        positives = np.add.reduceat(scores.positives, starts)
        negatives = np.add.reduceat(scores.negatives, starts)
        above = np.cumsum(scores.positives) - scores.positives
        above -= np.repeat(above[starts], np.diff(starts, append=len(above)))
        twice = np.add.reduceat(scores.negatives * (2 * above + scores.positives), starts)
        names = scores.group[starts]
        if self._open is not None:
            name, *sums = self._open
            if name == names[0]:
                twice[0] += sums[2] + 2 * sums[0] * negatives[0]
                positives[0] += sums[0]
                negatives[0] += sums[1]
            else:
                self._count(*(np.array([value]) for value in sums))
        self._open = (names[-1], positives[-1], negatives[-1], twice[-1])
        self._count(positives[:-1], negatives[:-1], twice[:-1])

    def finish(self) -> float:
        """GAUC; NaN where every group has one class only."""
        if self._open is not None:
            self._count(*(np.array([value]) for value in self._open[1:]))
            self._open = None
        return self._weighted / self._impressions if self._impressions else float("nan")

    def _count(self, positives: np.ndarray, negatives: np.ndarray, twice: np.ndarray) -> None:
        """Take whole groups."""
        both = (positives > 0) & (negatives > 0)
        self.groups += int(both.sum())
        self.left_out += int((~both).sum())
        positives, negatives, twice = positives[both], negatives[both], twice[both]
        impressions = (positives + negatives).astype(np.float64)
        self._impressions += float(impressions.sum())
        auc = twice / (2.0 * positives * negatives)
        self._weighted += float((impressions * auc).sum())
