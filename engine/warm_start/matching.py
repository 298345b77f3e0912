"""Which rows of a checkpoint's tables belong to which rows of a run's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stampede.data.learning.row_meanings import (
    OtherMeaningError,
    RowMeanings,
    matched_rows,
    row_meanings,
)
from stampede.data.prepared.manifest import FieldEntry
from stampede.engine.checkpoint import read_manifest
from stampede.engine.checkpoint.manifest import TableEntry
from stampede.engine.config import Config
from stampede.engine.config.data import SyntheticSection
from stampede.engine.datasets import data_folder
from stampede.engine.inference.inputs import remedy
from stampede.engine.warm_start.source import Source
from stampede.models import StoredColumns, table_name


class FieldMatch(NamedTuple):
    """How the table of a field goes with that of a checkpoint.

    Attributes:
        rows: `[rows now]` int64, the row of the checkpoint's table for each, -1 where there is
            none; None where nothing fits.
        saved_rows: of the checkpoint's table; 0 where it has none.
        why: why nothing fits; else empty.
    """

    rows: np.ndarray | None
    saved_rows: int
    why: str = ""


class Matching:
    """Matches the tables of a run with those of a checkpoint, one at a time; rank 0 asks it.

    Args:
        source: the checkpoint.
        config: of the run, whose data are prepared.
        sizes: rows of each field's table, by field.

    Attributes:
        sizes: as given.
    """

    def __init__(self, source: Source, config: Config, sizes: Mapping[str, int]) -> None:
        self._source = source
        self._config = config
        self.sizes = sizes

    def match(self, field: str) -> FieldMatch:
        """A field's table.

        Raises:
            DataError: a vocabulary is damaged.
        """
        table = self._tables.get(table_name(field))
        if table is None:
            return FieldMatch(None, 0, "not in the checkpoint")
        now = {n: list(where) for n, where in StoredColumns(self._config.model.dim).names.items()}
        if table.columns != now:
            dims = (columns["embedding"][1] for columns in (table.columns, now))
            return FieldMatch(None, table.rows, "dim was {}, now {}".format(*dims))
        saved = self._saved
        was = _rows_are_ids(field, table.rows) if saved is None else saved[field]
        try:
            return FieldMatch(matched_rows(was, self._now[field]), table.rows)
        except OtherMeaningError as reason:
            return FieldMatch(None, table.rows, str(reason))

    @cached_property
    def _tables(self) -> dict[str, TableEntry]:
        return read_manifest(self._source.checkpoint).tables

    @cached_property
    def _saved(self) -> dict[str, RowMeanings] | None:
        return self._source.meanings()

    @cached_property
    def _now(self) -> dict[str, RowMeanings]:
        if isinstance(self._config.data, SyntheticSection):
            return {field: _rows_are_ids(field, rows) for field, rows in self.sizes.items()}
        folder = data_folder(self._config)
        return row_meanings(folder, remedy(folder))


def _rows_are_ids(field: str, rows: int) -> RowMeanings:
    return RowMeanings(FieldEntry(name=field, rows=rows))
