"""Sources of samples: a part (training, validation, test) of a data set, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Samples:
    """Some rows of a part.

    Attributes:
        ids: `[n, fields]` integer, row of each field's table.
        dense: `[n, numbers]` float32.
        label: `[n]`, 0 or 1.
        true_probability: `[n]` float32 where the data know it, else None.
    """

    ids: np.ndarray
    dense: np.ndarray
    label: np.ndarray
    true_probability: np.ndarray | None = None


class Part(Protocol):
    """Rows 0 to `rows - 1` of one part of a data set."""

    rows: int
    # Whether an epoch visits the rows in a new order. Not where rows are drawn independently.
    shuffle: bool

    def read(self, rows: np.ndarray) -> Samples:
        """The given rows (`[n]` int64), in that order."""
        ...


@dataclass(frozen=True)
class Dataset:
    """A data set ready for training.

    Attributes:
        vocabulary_sizes: rows of each field's table, by field name, in the order of `ids`.
        numbers: number of numeric inputs.
        train, test: parts.
        validation: part on which the best epoch is chosen, or None.
    """

    vocabulary_sizes: Mapping[str, int]
    numbers: int
    train: Part
    validation: Part | None
    test: Part


@dataclass(frozen=True)
class Slice:
    """Rows `start` to `stop - 1` of another part."""

    part: Part
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    @property
    def shuffle(self) -> bool:
        """As in the other part."""
        return self.part.shuffle

    def read(self, rows: np.ndarray) -> Samples:
        """The given rows, counted from `start`."""
        return self.part.read(rows + self.start)
