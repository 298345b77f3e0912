"""Learns from the training part, a chunk at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from stampede.data.learning import learned
from stampede.data.learning.counts import ValueCounts
from stampede.data.learning.distinct import Distinct
from stampede.data.learning.learned import Learned
from stampede.data.learning.numbers import NumberRange, ranges
from stampede.data.learning.quantiles import edges
from stampede.data.learning.vocabulary import vocabulary
from stampede.data.overlap import computed_ahead
from stampede.data.schema import Schema
from stampede.data.schema.columns import Quantiles, Vocabulary
from stampede.data.schema.features import settled


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
        # Whether a number is to be the logarithm may be open until all are seen.
        self._log1p = {
            name: field.model_copy(update={"transform": ["log1p"]})
            for name, field in schema.numbers.items()
            if field.transform is None
        }
        self._ranges = {name: NumberRange() for name in schema.numbers}
        self._ranges_of_log1p = {name: NumberRange() for name in self._log1p}

    @property
    def spills(self) -> int:
        """How often counts of a field went to disk."""
        return self._counts.spills

    def add(self, frame: pl.DataFrame, distinct: Mapping[str, Distinct] | None = None) -> None:
        """Typed rows of the training part (see `stampede.data.raw.typed`).

        Args:
            distinct: the columns that `frame` lacks.
        """
        self.rows += len(frame)
        self._counts.add(frame, distinct)
        for seen, fields in (
            (self._ranges, self._schema.numbers),
            (self._ranges_of_log1p, self._log1p),
        ):
            for name, found in ranges(frame, fields).items():
                seen[name] = seen[name].merged(found)

    def save(self, folder: Path) -> Learned:
        """Write what was learned into a new folder, field by field, and read it back."""
        folder.mkdir(parents=True)
        seen = {name: self._ranges[name] for name in self._log1p}
        tails = {name: (found.low, found.high, found.mean) for name, found in seen.items()}
        schema = settled(self._schema, self.rows, tails)
        chosen = {
            name: found
            for name, found in self._ranges_of_log1p.items()
            if "log1p" in schema.numbers[name].transform
        }
        ids = schema.ids
        files = {
            name: f"{name}.parquet" for name, field in ids.items() if isinstance(field, Vocabulary)
        }

        def write_vocabulary(name: str) -> None:
            found = vocabulary(self._counts.tables(name), ids[name])
            found.write_parquet(folder / files[name])

        for _ in computed_ahead(write_vocabulary, files, 2, threads=2):
            pass
        quantiles = {
            name: edges(self._counts.tables(name), field.buckets)
            for name, field in ids.items()
            if isinstance(field, Quantiles)
        }
        learned.save(folder, schema, {**self._ranges, **chosen}, quantiles, files)
        return learned.load(folder)
