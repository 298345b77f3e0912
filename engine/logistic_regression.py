"""scikit-learn's logistic regression on a data set's features, a baseline for networks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stampede.data import Dataset, Part
from stampede.engine.metrics import PartMetrics, without_soft
from stampede.engine.start_up import importing

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

# Inverse strengths of the penalty, of which the validation part chooses, and the one without it.
_STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_USUAL = 0.1

# Fewest occurrences of ids with a column of their own, if the validation part prefers that.
_FREQUENT = 5

# A click log needs some 50 for the first four digits of its AUC.
_MOST_ITERATIONS = 100

# Training rows that C is chosen with, evenly spaced.
_CHOOSING_ROWS = 20_000

_CHUNK_ROWS = 1 << 16


def logistic_regression(
    dataset: Dataset, on_fit: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Fit the training part and score the other parts.

    `LogisticRegression(C)` of scikit-learn, on a column for each id of the training part and for
    each number, with sample weights scaled to a mean of 1. The validation part chooses, by AUC
    minus logloss: C, of six from the usual 0.1 on in the direction that is better; then whether
    rare ids have their shared column, or only frequent ids have one. Some 20,000 rows of a larger
    log choose it. Without a validation part C is 0.1, with all columns. An id that occurs
    twice in a sample counts twice, or as its share of the ids of a field that is averaged; unseen
    ids count nothing. Memory: some 12 bytes for each id of each row, on the CPU of this process.

    Args:
        dataset: whose parts are on the CPU.
        on_fit: called after each fit.

    Returns:
        `test_auc`, `test_logloss`, the same for `validation` if there is such a part, the `C`, the
        number of `columns`, and `seconds`. An AUC is None where one class is absent.

    Raises:
        ValueError: the training part has one class only.
    """
    with importing():
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from threadpoolctl import threadpool_limits

    start = time.perf_counter()
    inputs, label, weight = features(dataset, dataset.train)
    seen = np.unique(inputs.indices)
    # The model knows classes only.
    taken, label, weight = without_soft(label, np.asarray(weight))
    inputs = inputs if len(taken) == inputs.shape[0] else inputs[taken]
    weight *= len(weight) / weight.sum()
    others = {
        name: features(dataset, part) for name, part in dataset.parts().items() if name != "train"
    }

    def fitted(strength: float, columns: np.ndarray, rows: slice) -> dict[str, Any]:
        model = LogisticRegression(C=strength, max_iter=_MOST_ITERATIONS)
        # Its loops are too short for several threads: beside other processes two took 27 s for
        # what one does in one.
        with warnings.catch_warnings(), threadpool_limits(1):
            # The limit is meant.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(inputs[rows][:, columns], label[rows], weight[rows])
        found: dict[str, Any] = {"C": strength, "columns": len(columns)}
        for name, (features, *known) in others.items():
            metrics = PartMetrics([])
            logits = model.decision_function(features[:, columns])
            metrics.add(logits.astype(np.float32), *known)
            result = metrics.result()
            found |= {f"{name}_{metric}": result[metric] for metric in ("auc", "logloss")}
        on_fit()
        return found

    best, columns, some = None, seen, slice(None, None, -(-len(label) // _CHOOSING_ROWS))
    if "validation" in others and len(np.unique(label[some])) == 2:
        best = _best_strength(lambda strength: fitted(strength, seen, some))
        for fewer in _fewer_columns(dataset, inputs, seen):
            found = fitted(best["C"], fewer, some)
            if _worth(found) > _worth(best):
                best, columns = found, fewer
    if best is None or some.step > 1:
        best = fitted(best["C"] if best else _USUAL, columns, slice(None))
    return {**best, "seconds": time.perf_counter() - start}


def _worth(found: Mapping[str, Any]) -> float:
    return (found["validation_auc"] or 0) - found["validation_logloss"]


def _best_strength(fitted: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
    """The best fit among `_STRENGTHS`, from the usual one on until the next is no better."""
    usual = _STRENGTHS.index(_USUAL)
    best = start = fitted(_USUAL)
    for further in (_STRENGTHS[usual + 1 :], _STRENGTHS[:usual][::-1]):
        for strength in further:
            found = fitted(strength)
            if _worth(found) <= _worth(best):
                break
            best = found
        if best is not start:
            break
    return best


def _fewer_columns(dataset: Dataset, inputs: csr_matrix, seen: np.ndarray) -> list[np.ndarray]:
    """Columns without those that rare and unseen ids share, and those of frequent ids only."""
    first_rows = np.cumsum([0, *dataset.vocabulary_sizes.values()])
    fields = list(dataset.vocabulary_sizes)
    shared = [first_rows[fields.index(name)] + row for name, row in dataset.unseen_rows.items()]
    own = np.setdiff1d(seen, shared)
    counts = np.bincount(inputs.indices, minlength=inputs.shape[1])
    frequent = own[(counts[own] >= _FREQUENT) | (own >= first_rows[-1])]
    return [one for one in (own, frequent) if 0 < len(one) < len(seen)]


def features(dataset: Dataset, part: Part) -> tuple[csr_matrix, np.ndarray, np.ndarray]:
    """Inputs `[n, rows of all tables + numbers]`, labels and weights `[n]` float32 of a part."""
    from scipy.sparse import csr_matrix, hstack, vstack

    first_rows = np.cumsum([0, *dataset.vocabulary_sizes.values()])
    is_mean = [name in dataset.mean for name in dataset.multi]
    inputs, labels, weights = [], [], []
    for start in range(0, part.rows, _CHUNK_ROWS):
        samples = part.read(torch.arange(start, min(start + _CHUNK_ROWS, part.rows)))
        rows, single = samples.ids.shape
        columns = [(samples.ids.numpy() + first_rows[:single]).reshape(-1)]
        places = [np.arange(rows).repeat(single)]
        values = [np.ones(rows * single, np.float32)]
        for bag, first, mean in zip(samples.bags, first_rows[single:-1], is_mean, strict=True):
            lengths = bag.lengths.numpy()
            columns.append(bag.values.numpy() + first)
            places.append(np.arange(rows).repeat(lengths))
            each = 1 / lengths.clip(min=1) if mean else np.ones(rows)
            each = each.astype(np.float32).repeat(lengths)
            values.append(each if bag.weights is None else each * bag.weights.numpy())
        column, place, value = (np.concatenate(some) for some in (columns, places, values))
        # Equal ids of a sample are added up.
        ids = csr_matrix((value, (place, column)), (rows, int(first_rows[-1])))
        inputs.append(hstack([ids, csr_matrix(samples.dense.numpy())], "csr"))
        labels.append(samples.label.float().numpy())
        weights.append(np.ones(rows, np.float32) if samples.weight is None else samples.weight)
    return vstack(inputs, "csr"), np.concatenate(labels), np.concatenate(weights)
