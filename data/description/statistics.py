"""What is known of the columns of a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stampede.data.description.slices import LabelSlices
from stampede.data.learning.numbers import NumberRange
from stampede.data.splits import TRAIN

TOPS = (1, 10, 100, 1000)
QUANTILES = (0.25, 0.5, 0.75, 0.99)


@dataclass(frozen=True)
class ByPart:
    """Values of a column in each part (training, validation, test).

    Attributes:
        values: `[3]` rows, or ids where a row may have several; a row without one counts as one.
        missing: `[3]` how many are missing.
        unseen: `[3]` how many are ids that the training part lacks; None for numbers.
    """

    values: np.ndarray
    missing: np.ndarray
    unseen: np.ndarray | None = None

    @property
    def known(self) -> bool:
        """Whether anything is known: not of numbers whose missing values were filled."""
        return bool(self.values.any())

    def missing_share(self, part: int) -> float | None:
        """Share of a part's values that is missing; None where the part is empty."""
        return _share(self.missing[part], self.values[part])

    def unseen_share(self, part: int) -> float | None:
        """Share of a part's values that the training part lacks; None where either is empty."""
        if self.unseen is None or not self.values[TRAIN]:
            return None
        return _share(self.unseen[part], self.values[part])

    def missing_in_all(self) -> float | None:
        """Share of all values that is missing."""
        return _share(self.missing.sum(), self.values.sum())


@dataclass(frozen=True)
class IdColumn:
    """An id field.

    Attributes:
        name: of the field.
        by_part: missing and unseen ids.
        distinct: number of different ids.
        curve: `[points]` k and the share of all ids that are present which the k most frequent
            cover, for k from 1 to `distinct`.
        top: the most frequent ids.
    """

    name: str
    by_part: ByPart
    distinct: int
    curve: tuple[np.ndarray, np.ndarray]
    top: list[Any]

    def coverage(self, ids: int) -> float | None:
        """Share of the most frequent `ids` ids; one of `TOPS`. None where no id is present."""
        if not self.distinct:
            return None
        place = np.searchsorted(self.curve[0], min(ids, self.distinct))
        return float(self.curve[1][place])


@dataclass(frozen=True)
class NumberColumn:
    """A number.

    Attributes:
        name: of the number.
        by_part: missing values.
        range: smallest, largest, mean of those that are there.
        quantiles: at `QUANTILES`; empty where no value is there.
        sample: some values, those that are there.
    """

    name: str
    by_part: ByPart
    range: NumberRange
    quantiles: list[float]
    sample: np.ndarray


@dataclass(frozen=True)
class Statistics:
    """Of a whole data set.

    Attributes:
        rows: `[3]` of each part.
        positives: `[3]` rows of each part with label 1.
        ids: id fields.
        numbers: numbers.
        slices: label rate over time.
        sampled: rows that quantiles are of; None: all.
    """

    rows: np.ndarray
    positives: np.ndarray
    ids: list[IdColumn]
    numbers: list[NumberColumn]
    slices: LabelSlices
    sampled: int | None


def _share(count: int, of: int) -> float | None:
    return float(count / of) if of else None
