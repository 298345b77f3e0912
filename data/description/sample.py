"""A random sample of rows of a stream."""

from __future__ import annotations

import numpy as np
import polars as pl

_DRAW = "#draw"


class RowSample:
    """Keeps each row with the same chance, which halves whenever there are too many.

    Args:
        most: rows that are kept.
        seed: of the draws.
    """

    def __init__(self, most: int, seed: int = 0) -> None:
        self._most = most
        self._draws = np.random.default_rng(seed)
        self._chance = 1.0
        self._frames: list[pl.DataFrame] = []
        self._rows = 0

    @property
    def whole(self) -> bool:
        """Whether every row so far was kept."""
        return self._chance == 1.0

    def add(self, frame: pl.DataFrame) -> None:
        """Some rows; every call has the same columns."""
        frame = frame.with_columns(pl.Series(_DRAW, self._draws.random(len(frame))))
        self._frames.append(self._kept(frame))
        self._rows += len(self._frames[-1])
        while self._rows > self._most:
            self._chance /= 2
            self._frames = [self._kept(pl.concat(self._frames))]
            self._rows = len(self._frames[0])

    def frame(self) -> pl.DataFrame:
        """The rows that were kept."""
        return pl.concat(self._frames).drop(_DRAW) if self._frames else pl.DataFrame()

    def _kept(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame if self.whole else frame.filter(pl.col(_DRAW) < self._chance)
