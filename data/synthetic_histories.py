"""Users with drifting tastes and their histories, from a known truth: what DIN is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from stampede.data.samples import Dataset, Slice
from stampede.data.synthetic import TEST, TRAIN, TRUTH, Drawn, SyntheticPart

USERS, GENRES, ITEMS_OF_GENRE = 2000, 50, 2
ITEMS = GENRES * ITEMS_OF_GENRE
MOST = 50  # ids of a history

Pooling = Literal["sum", "mean", "attention", "none"]

# A user's tastes change as often, in the time that a log covers; two hold at a time.
_CHANGES = 4
# Share of the ids of a history that follow the tastes of their time, and of the items shown.
_OF_TASTE, _SHOWN_OF_TASTE = 0.8, 0.4


@dataclass(frozen=True)
class SyntheticHistories:
    """Clicks that depend on how well the item matches the user's history.

    Each item has a genre, which no column tells. An id of the history was chosen at its time, by
    one of the two genres that the user liked then. The logit is `bias + weight of the item +
    strength * (1 - exp(-m))`, where m is the number of ids of the item's genre in the history, the
    k-th last of which counts `exp(-k / memory)`: the first few matches decide, and ids of other
    genres do not matter.

    Attributes:
        seed: seed of truth and samples.
        pooling: how the model reads a history.
        mean_length: of a history; lengths are geometric, at most 50, some are 0.
        strength, memory, weight_std, bias: see above; `weight_std` of the items' weights.
    """

    seed: int = 0
    pooling: Pooling = "attention"
    mean_length: float = 12.0
    strength: float = 4.0
    memory: float = 20.0
    weight_std: float = 0.5
    bias: float = -3.0

    def dataset(self, train_rows: int, test_rows: int, validation_rows: int = 0) -> Dataset:
        """Parts of that many rows; validation is the end of the training rows."""
        truth, query = _Truth(self), {"history": "item"}
        train = SyntheticPart(truth, TRAIN, train_rows)
        kept = train_rows - validation_rows
        return Dataset(
            vocabulary_sizes={"user": USERS, "item": ITEMS, "history": ITEMS},
            numbers=0,
            train=Slice(train, 0, kept),
            validation=Slice(train, kept, train_rows) if validation_rows else None,
            test=SyntheticPart(truth, TEST, test_rows),
            multi=("history",),
            mean=("history",) if self.pooling == "mean" else (),
            attention=query if self.pooling == "attention" else {},
            sequences=query if self.pooling == "none" else {},
            shared={"history": "item"},
            shuffle=False,
        )


class _Truth:
    """Weights of items, tastes of users, and the drawing of samples from them."""

    def __init__(self, clicks: SyntheticHistories) -> None:
        self.clicks = clicks
        draw = np.random.default_rng([clicks.seed, TRUTH])
        # So that numbers of items say nothing about their genres.
        self.items = draw.permutation(ITEMS).reshape(GENRES, ITEMS_OF_GENRE)
        self.genres = np.empty(ITEMS, np.int64)
        self.genres[self.items] = np.arange(GENRES)[:, None]
        self.weights = draw.standard_normal(ITEMS) * clicks.weight_std
        self.tastes = draw.integers(0, GENRES, (USERS, _CHANGES + 2))

    def _chosen(
        self, draw: np.random.Generator, users: np.ndarray, times: np.ndarray, share: float
    ) -> np.ndarray:
        """Items by the tastes of users at times in [0, 1], or with probability 1 - `share` any."""
        at = (times * _CHANGES).astype(np.int64) + draw.integers(0, 2, times.shape)
        genre = np.where(
            draw.random(times.shape) < share,
            self.tastes[users, at],
            draw.integers(0, GENRES, times.shape),
        )
        return self.items[genre, draw.integers(0, ITEMS_OF_GENRE, times.shape)]

    def draw_samples(self, draw: np.random.Generator, rows: int) -> Drawn:
        """Independent samples with their true click probability."""
        clicks = self.clicks
        users, now = draw.integers(0, USERS, rows), draw.random(rows)
        lengths = np.minimum(draw.geometric(1 / (clicks.mean_length + 1), rows) - 1, MOST)
        # Oldest first; the last column is the most recent id.
        back = np.arange(MOST - 1, -1, -1)
        times = np.maximum(now[:, None] - 0.01 * back, 0.0)
        history = self._chosen(draw, users[:, None].repeat(MOST, 1), times, _OF_TASTE)
        history[back >= lengths[:, None]] = -1
        items = self._chosen(draw, users, now, _SHOWN_OF_TASTE)
        is_match = (self.genres[history] == self.genres[items][:, None]) & (history >= 0)
        matches = is_match @ np.exp(-back / clicks.memory)
        logit = clicks.bias + self.weights[items] + clicks.strength * (1 - np.exp(-matches))
        probability = (1.0 / (1.0 + np.exp(-logit))).astype(np.float32)
        label = draw.random(rows, dtype=np.float32) < probability
        dense = np.empty((rows, 0), np.float32)
        ids = np.stack([users, items], 1)
        return Drawn(ids, dense, label.astype(np.uint8), probability, history)
