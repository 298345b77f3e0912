"""Rows as they stand in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from stampede.data.raw.bad_rows import BadRow
from stampede.data.raw.missing_marks import Marks


@dataclass(frozen=True)
class RawRows:
    """Some rows of a file.

    Attributes:
        frame: the used columns.
        file: its name.
        lines: `[n]` number of each row's line, or row of a Parquet file, from 1.
        numbers: `[n]` number of each row within the file, from 0, bad rows counted.
        text: the lines themselves, `n` of them; None for Parquet.
        position: bytes of the file read so far.
        bad: rows that are not among them because they could not be told apart into columns.
        marks: cells that are null because of their text.
    """

    frame: pl.DataFrame
    file: str
    lines: np.ndarray
    numbers: np.ndarray
    text: bytes | None
    position: int
    bad: Sequence[BadRow] = ()
    marks: Marks = field(default_factory=Counter)

    def row_texts(self, indices: Sequence[int]) -> list[str]:
        """Whole rows, for a person."""
        if self.text is None:
            return [str(self.frame.row(index, named=True)) for index in indices]
        lines = self.text.split(b"\n")
        return [lines[index].decode("utf-8", "replace").rstrip("\r") for index in indices]
