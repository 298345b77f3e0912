"""LightGBM on a data set's features, a baseline for networks where it is installed."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

from stampede.data import Dataset, Part
from stampede.engine.logistic_regression import features
from stampede.engine.metrics import PartMetrics
from stampede.engine.start_up import importing

# Leaves of a tree, of which the validation part chooses.
_LEAVES = (15, 63)
_MOST_TREES, _UNTIL_NO_BETTER = 500, 20
_PARAMETERS = {
    # That of logistic regression, also for labels between 0 and 1.
    "objective": "cross_entropy", "metric": "cross_entropy", "learning_rate": 0.1,
    "feature_fraction": 0.5, "lambda_l2": 5.0, "seed": 1, "deterministic": True,
    "force_row_wise": True, "verbose": -1,
    # On a busy machine several threads wait for each other: 15 s instead of 1.3.
    "num_threads": 1,
}  # fmt: skip
# Of a field of several ids, so many of the most frequent ones have a column.
_MOST_FREQUENT = 30


def boosted_trees(
    dataset: Dataset, on_fit: Callable[[], object] = lambda: None
) -> dict[str, Any] | None:
    """Fit the training part, stop by the validation part, and score the other parts.

    A field of one id is a category, a number a number; a field of several ids has a column of
    occurrences for each of its 30 most frequent ones. Memory: 4 bytes for each column of each row.

    Args:
        dataset: whose parts are on the CPU.
        on_fit: called after each fit.

    Returns:
        As `logistic_regression`, with the number of `trees` and `leaves`; None without LightGBM or
        without a validation part.

    Raises:
        ValueError: LightGBM cannot be fitted.
    """
    try:
        with importing():
            import lightgbm
    # OSError: a library of the system is missing, such as libgomp.
    except (ImportError, OSError):
        return None
    if dataset.validation is None:
        return None
    try:
        return _fitted(lightgbm, dataset, on_fit)
    except lightgbm.basic.LightGBMError as failure:
        raise ValueError(f"LightGBM: {failure}") from None


def _fitted(lightgbm: ModuleType, dataset: Dataset, on_fit: Callable[[], object]) -> dict[str, Any]:
    start = time.perf_counter()
    frequent = _frequent(dataset)
    inputs, labels, weights = {}, {}, {}
    for name, part in dataset.parts().items():
        inputs[name], labels[name], weights[name] = _inputs(dataset, part, frequent)
    single = len(dataset.vocabulary_sizes) - len(dataset.multi)
    given = {"categorical_feature": list(range(single)), "free_raw_data": False}
    train = lightgbm.Dataset(inputs["train"], labels["train"], weight=weights["train"], **given)
    known = train.create_valid(
        inputs["validation"], labels["validation"], weight=weights["validation"]
    )
    best = None
    for leaves in _LEAVES:
        model = lightgbm.train(
            {**_PARAMETERS, "num_leaves": leaves}, train, _MOST_TREES, [known],
            callbacks=[lightgbm.early_stopping(_UNTIL_NO_BETTER, verbose=False)],
        )  # fmt: skip
        on_fit()
        loss = model.best_score["valid_0"]["cross_entropy"]
        if best is None or loss < best[0]:
            best = loss, leaves, model
    _, leaves, model = best
    found: dict[str, Any] = {"trees": model.best_iteration, "leaves": leaves}
    for name in ("validation", "test"):
        metrics = PartMetrics([])
        logits = model.predict(inputs[name], raw_score=True)
        metrics.add(logits.astype(np.float32), labels[name], weights[name])
        result = metrics.result()
        found |= {f"{name}_{metric}": result[metric] for metric in ("auc", "logloss")}
    return {**found, "seconds": time.perf_counter() - start}


def _frequent(dataset: Dataset) -> np.ndarray:
    """Columns of `features` that a tree sees: of frequent ids of several, and the numbers."""
    inputs, *_ = features(dataset, dataset.train)
    counts, kept, first = np.bincount(inputs.indices, minlength=inputs.shape[1]), [], 0
    for name, rows in dataset.vocabulary_sizes.items():
        if name in dataset.multi:
            order = np.argsort(-counts[first : first + rows], kind="stable")
            kept.append(first + order[:_MOST_FREQUENT])
        first += rows
    return np.concatenate([*kept, np.arange(first, inputs.shape[1])]).astype(np.int64)


def _inputs(
    dataset: Dataset, part: Part, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns `[rows, categories + numbers]` float32, labels and weights of a part."""
    others, label, weight = features(dataset, part)
    ids = part.read(torch.arange(part.rows)).ids.numpy()
    return np.hstack([ids, others[:, columns].toarray()], dtype=np.float32), label, weight
