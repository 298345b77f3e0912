"""How often the rows of a table are looked up, as far as it is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Frequencies(Protocol):
    """Of one table's rows."""

    def below(self, row: int) -> float:
        """Share of the lookups that go to rows `0 .. row - 1`."""
        ...


@dataclass(frozen=True)
class Uniform:
    """Every row is looked up equally often, as hashed ids nearly are."""

    rows: int

    def below(self, row: int) -> float:
        """See `Frequencies.below`."""
        return row / self.rows


@dataclass(frozen=True)
class Zipf:
    """Row `i` is looked up in proportion to the integral of `x^-exponent` over `[i+1, i+2)`.

    That is how synthetic clicks are drawn; preparation, too, puts the most frequent ids first.
    """

    rows: int
    exponent: float

    def below(self, row: int) -> float:
        """See `Frequencies.below`."""
        power = 1.0 - self.exponent
        return (1.0 - (row + 1.0) ** power) / (1.0 - (self.rows + 1.0) ** power)


@dataclass(frozen=True, eq=False)
class Sampled:
    """As in a sample.

    Attributes:
        ids: sorted ids of the sample; there is one at least.
    """

    ids: np.ndarray

    def below(self, row: int) -> float:
        """See `Frequencies.below`."""
        return float(np.searchsorted(self.ids, row)) / len(self.ids)
