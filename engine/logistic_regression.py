"""Logistic regression on a data set's features, a baseline for networks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stampede.data import Dataset, Part, Samples
from stampede.engine.metrics import PartMetrics

# L2 is this over the number of training rows: C = 0.1 in scikit-learn.
_L2_ROWS = 5.0

# Most passes over the training part; a preconditioned fit of a click log needs some 30.
_MOST_ITERATIONS = 200

# Smallest gain of the mean loss; below it, an AUC's first four digits no longer change.
_LEAST_GAIN = 1e-8

_CHUNK_ROWS = 1 << 16

# Bytes of training chunks kept in memory; others are read in every pass.
_KEPT_BYTES = 1e9


class _Chunk(NamedTuple):
    """Some rows; ids are places among the ids of the training part.

    Attributes:
        ids: `[single-valued fields, n]` int32.
        bag_ids, bag_rows: `[k]` int32, ids of multi-valued fields, and the row of each.
        numbers: `[n, numbers]` float32.
        label, weight: `[n]` float32.
    """

    ids: Tensor
    bag_ids: Tensor
    bag_rows: Tensor
    numbers: Tensor
    label: Tensor
    weight: Tensor


class LogisticRegression:
    """A weight for each id and number, and a bias, on the CPU of this process.

    It minimises `sum(w * BCE) / sum(w) + 5 / n * ||weights||^2` over the n training rows by L-BFGS,
    with sample weights w and without a penalty on the bias. If the weights have mean 1, this is
    scikit-learn's `LogisticRegression(C=0.1)`. An id that occurs twice in a sample counts twice.
    Memory: 5 bytes for each row of the tables, some 110 for each id of the training part, and up to
    a gigabyte for training rows; the rest is read in every pass.

    Args:
        dataset: whose parts are on the CPU.
        on_chunk: called at least every 65,536 rows.
    """

    def __init__(self, dataset: Dataset, on_chunk: Callable[[], object] = lambda: None) -> None:
        self._dataset = dataset
        self._on_chunk = on_chunk
        sizes = list(dataset.vocabulary_sizes.values())
        # Ids of all fields share one array, field after field.
        self._first_rows = torch.tensor([0, *sizes]).cumsum(0)
        seen = torch.zeros(int(self._first_rows[-1]), dtype=torch.bool)
        for rows, _, _ in self._read(dataset.train):
            for ids in rows:
                seen[ids.reshape(-1)] = True
        # The place of every table row among the rows of the training part.
        places = torch.cumsum(seen, 0, dtype=torch.int32) - 1
        known = int(places[-1]) + 1
        self._places = torch.where(seen, places, known)
        # Weights of ids, of unseen ids (always 0), of numbers, and the bias.
        self._weights = torch.zeros(known + 1 + dataset.numbers + 1)
        self._numbers = slice(known + 1, -1)
        self._kept: list[_Chunk] = []
        self.iterations = 0

    @torch.no_grad()
    def fit(self) -> None:
        """Fit the training part; ValueError if it has one class only: its bias is infinite."""
        penalty = _L2_ROWS / self._dataset.train.rows
        # Total weight, weight of positives, and weighted sum of squares of each input.
        total = positive = 0.0
        squares = torch.zeros_like(self._weights)
        for chunk in self._training():
            total += float(chunk.weight.sum(dtype=torch.float64))
            positive += float((chunk.weight * chunk.label).sum(dtype=torch.float64))
            self._add(chunk, chunk.weight, squares, chunk.numbers.square())
        if not 0 < positive < total:
            raise ValueError("the training part has one class only")
        rate = positive / total
        # Scaled like this, weights of frequent and rare ids have a curvature near 1, which saves
        # two thirds of the passes.
        curvature = rate * (1 - rate) * squares / total
        curvature[:-1] += 2 * penalty
        scale = curvature.rsqrt()
        scaled = torch.zeros_like(self._weights)
        scaled[-1] = np.log(rate / (1 - rate)) / scale[-1].item()
        optimizer = torch.optim.LBFGS(
            [scaled],
            max_iter=_MOST_ITERATIONS,
            history_size=10,
            tolerance_grad=0.0,
            tolerance_change=_LEAST_GAIN,
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            torch.mul(scaled, scale, out=self._weights)
            value, gradient = self._loss(total, penalty)
            scaled.grad = gradient.mul_(scale)
            return value

        optimizer.step(loss)
        torch.mul(scaled, scale, out=self._weights)
        self.iterations = optimizer.state[scaled]["n_iter"]

    def scores(self, part: Part) -> dict[str, float | None]:
        """Weighted `auc` and `logloss` of a part; the AUC is None if one class is absent."""
        chunks = [(self._logits(chunk), chunk.label, chunk.weight) for chunk in self._chunks(part)]
        metrics = PartMetrics([])
        metrics.add(*(torch.cat(column).numpy() for column in zip(*chunks, strict=True)))
        result = metrics.result()
        return {name: result[name] for name in ("auc", "logloss")}

    def _loss(self, total: float, penalty: float) -> tuple[Tensor, Tensor]:
        gradient = torch.zeros_like(self._weights)
        value = torch.zeros((), dtype=torch.float64)
        for chunk in self._training():
            logits = self._logits(chunk)
            losses = functional.binary_cross_entropy_with_logits(
                logits, chunk.label, chunk.weight, reduction="none"
            )
            value += losses.sum(dtype=torch.float64)
            residual = chunk.weight * (torch.sigmoid(logits) - chunk.label)
            self._add(chunk, residual, gradient, chunk.numbers)
        gradient /= total
        weights = self._weights[:-1]
        gradient[:-1] += 2 * penalty * weights
        return value / total + penalty * weights.double().square().sum(), gradient

    def _logits(self, chunk: _Chunk) -> Tensor:
        """`[n]` float32."""
        weights = self._weights
        logits = weights[-1] + chunk.numbers @ weights[self._numbers]
        for ids in chunk.ids:
            logits += weights.index_select(0, ids)
        return logits.index_add_(0, chunk.bag_rows, weights.index_select(0, chunk.bag_ids))

    def _add(self, chunk: _Chunk, values: Tensor, sums: Tensor, numbers: Tensor) -> None:
        """Add each row's value to the sums of the row's ids and numbers."""
        for ids in chunk.ids:
            sums.index_add_(0, ids, values)
        sums.index_add_(0, chunk.bag_ids, values.index_select(0, chunk.bag_rows))
        sums[self._numbers] += values @ numbers
        sums[-1] += values.sum()

    def _training(self) -> Iterator[_Chunk]:
        for chunk in self._kept:
            self._on_chunk()
            yield chunk
        first = sum(len(chunk.label) for chunk in self._kept)
        room = _KEPT_BYTES - sum(tensor.nbytes for chunk in self._kept for tensor in chunk)
        for chunk in self._chunks(self._dataset.train, first):
            room -= sum(tensor.nbytes for tensor in chunk)
            if room >= 0:
                self._kept.append(chunk)
            yield chunk

    def _chunks(self, part: Part, first: int = 0) -> Iterator[_Chunk]:
        for (single, *bags), samples, weight in self._read(part, first):
            lengths = [bag.lengths for bag in samples.bags]
            of_rows = [torch.arange(len(weight)).repeat_interleave(length) for length in lengths]
            none = torch.empty(0, dtype=torch.int64)
            yield _Chunk(
                self._places[single],
                self._places[torch.cat([none, *bags])],
                torch.cat([none, *of_rows]).int(),
                samples.dense,
                samples.label.float(),
                weight,
            )

    def _read(self, part: Part, first: int = 0) -> Iterator[tuple[list[Tensor], Samples, Tensor]]:
        """Rows over all tables, samples, and weights of a part, starting at sample `first`.

        The rows are `[single-valued fields, n]`, then `[ids]` of each bag.
        """
        for start in range(first, part.rows, _CHUNK_ROWS):
            self._on_chunk()
            samples = part.read(torch.arange(start, min(start + _CHUNK_ROWS, part.rows)))
            single, weight = samples.ids.shape[1], samples.weight
            bags = zip(samples.bags, self._first_rows[single:-1], strict=True)
            rows = [samples.ids.T + self._first_rows[:single, None]]
            rows += [bag.values + row for bag, row in bags]
            yield rows, samples, torch.ones(len(samples.label)) if weight is None else weight


def logistic_regression(
    dataset: Dataset, on_chunk: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Fit the training part and score the other parts, see `LogisticRegression`.

    Returns:
        `test_auc`, `test_logloss`, the same for `validation` if there is such a part, `iterations`
        and `seconds`.

    Raises:
        ValueError: the training part has one class only.
    """
    start = time.perf_counter()
    model = LogisticRegression(dataset, on_chunk)
    model.fit()
    found: dict[str, Any] = {}
    for name, part in (("validation", dataset.validation), ("test", dataset.test)):
        if part is not None:
            found |= {f"{name}_{metric}": value for metric, value in model.scores(part).items()}
    return {**found, "iterations": model.iterations, "seconds": time.perf_counter() - start}
