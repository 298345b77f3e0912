"""Learns from the training part, a chunk at a time."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from stampede.data.learning import learned
from stampede.data.learning.counts import ValueCounts
from stampede.data.learning.learned import Learned
from stampede.data.learning.numbers import NumberRange, ranges
from stampede.data.learning.quantiles import edges
from stampede.data.learning.vocabulary import vocabulary
from stampede.data.schema import Schema
from stampede.data.schema.columns import Quantiles, Vocabulary


class Learner:
    """Counts ids and finds ranges.

    Args:
        schema: of the rows.
        budget: bytes of counts in memory.
        spill: folder for counts above it.

    Attributes:
        rows: seen so far.
    """

    def __init__(self, schema: Schema, budget: int, spill: Path) -> None:
        self._schema = schema
        counted = [
            name for name, field in schema.ids.items() if isinstance(field, Vocabulary | Quantiles)
        ]
        self._counts = ValueCounts(counted, budget, spill)
        self.rows = 0
        self._ranges = {name: NumberRange() for name in schema.numbers}

    @property
    def spills(self) -> int:
        """How often counts of a field went to disk."""
        return self._counts.spills

    def add(self, frame: pl.DataFrame) -> None:
        """Typed rows of the training part (see `stampede.data.raw.typed`)."""
        self.rows += len(frame)
        self._counts.add(frame)
        for name, found in ranges(frame, self._schema.numbers).items():
            self._ranges[name] = self._ranges[name].merged(found)

    def save(self, folder: Path) -> Learned:
        """Write what was learned into a new folder, field by field, and read it back."""
        folder.mkdir(parents=True)
        quantiles: dict[str, list[float]] = {}
        files: dict[str, str] = {}
        for name, field in self._schema.ids.items():
            if isinstance(field, Vocabulary):
                files[name] = f"{name}.parquet"
                vocabulary(self._counts.tables(name), field).write_parquet(folder / files[name])
            elif isinstance(field, Quantiles):
                quantiles[name] = edges(self._counts.tables(name), field.buckets)
        learned.save(folder, self._schema, self._ranges, quantiles, files)
        return learned.load(folder)
