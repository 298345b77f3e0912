"""Sorted samples as distinct scores, with how many clicks and others each one has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from stampede.engine.metrics.keys import score_of, unpack


class Scores(NamedTuple):
    """Distinct scores, of one group or of each group, the highest first.

    Attributes:
        group: `[n]` uint64, ascending; zeros where there are no groups.
        score: `[n]` float32.
        samples: `[n]` int64.
        positives, negatives: `[n]`, samples of each class: int64, or float64 sums of weights.
    """

    group: np.ndarray
    score: np.ndarray
    samples: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray


def distinct_scores(chunks: Iterable[np.ndarray], weighted: bool) -> Iterator[Scores]:
    """Add up equal scores, whatever the chunks.

    Args:
        chunks: `[1, n]` keys (see `stampede.engine.metrics.keys`) or `[2, n]` groups and keys,
            ascending over all chunks, none empty.
        weighted: whether samples count for their weights.
    """
    open_end: Scores | None = None
    for chunk in chunks:
        scores = _distinct(chunk, weighted)
        if open_end is not None:
            scores = _joined(open_end, scores)
        # The next chunk may go on with the same score.
        open_end = Scores(*(column[-1:] for column in scores))
        if len(scores.score) > 1:
            yield Scores(*(column[:-1] for column in scores))
    if open_end is not None:
        yield open_end


def _distinct(chunk: np.ndarray, weighted: bool) -> Scores:
    order, label, weight = unpack(chunk[-1])
    groups = chunk[0] if len(chunk) == 2 else np.zeros_like(chunk[0])
    first = np.ones(len(order), bool)
    np.not_equal(order[1:], order[:-1], out=first[1:])
    first[1:] |= groups[1:] != groups[:-1]
    starts = np.flatnonzero(first)
    samples = np.diff(starts, append=len(order))
    if weighted:
        weight = weight.astype(np.float64)
        positives = np.add.reduceat(weight * label, starts)
        negatives = np.add.reduceat(weight * (1 - label), starts)
    else:
        positives = np.add.reduceat(label.view(np.int64), starts)
        negatives = samples - positives
    return Scores(groups[starts], score_of(order[starts]), samples, positives, negatives)


def _joined(last: Scores, scores: Scores) -> Scores:
    """A score and those that follow, among which it may be again."""
    same_group = last.group[0] == scores.group[0]
    # As bits: a NaN equals itself.
    if same_group and last.score.view(np.uint32)[0] == scores.score.view(np.uint32)[0]:
        for total, more in zip(scores[2:], last[2:], strict=True):
            total[0] += more[0]
        return scores
    return Scores(*(np.concatenate(pair) for pair in zip(last, scores, strict=True)))
