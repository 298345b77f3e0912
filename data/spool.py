"""Typed rows kept on disk between the two passes, so that a log is parsed once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from stampede.data.learning.vocabulary import hashed
from stampede.data.schema import Schema

_PART, _POSITION = "#part", "#position"


class Spooled(NamedTuple):
    """Some rows, ids of vocabularies as hashes.

    Attributes:
        frame: their typed columns (see `stampede.data.raw.typed`).
        parts: `[n]` int8, part of each row.
        position: bytes of the log read up to them.
    """

    frame: pl.DataFrame
    parts: np.ndarray
    position: int


class Spool:
    """A folder with a file for each chunk, removed as it is read.

    Args:
        folder: a new one.
        schema: of the rows.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._count = 0
        folder.mkdir()

    def append(self, frame: pl.DataFrame, parts: np.ndarray, position: int) -> None:
        """Keep some typed rows."""
        kept = hashed(frame, self._schema).with_columns(
            pl.Series(_PART, parts), pl.lit(position).alias(_POSITION)
        )
        kept.write_ipc(self._folder / f"{self._count}.arrow", compression="uncompressed")
        self._count += 1

    def __iter__(self) -> Iterator[Spooled]:
        for number in range(self._count):
            path = self._folder / f"{number}.arrow"
            frame = pl.read_ipc(path)
            path.unlink()
            if len(frame):
                parts = frame[_PART].to_numpy()
                yield Spooled(frame.drop(_PART, _POSITION), parts, frame[_POSITION][0])
