"""Rows for the ids of a field."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
import polars as pl

from stampede.data.learning.counts import COUNT, VALUE
from stampede.data.schema import Schema
from stampede.data.schema.columns import Vocabulary

# First rows of a table; the vocabulary follows.
MISSING_ROW, UNSEEN_ROW, FIRST_ROW = 0, 1, 2

_SEED = 0


def vocabulary(counts: Iterable[pl.DataFrame], field: Vocabulary) -> pl.DataFrame:
    """The ids that get a row: the most frequent first, ties by their text.

    Args:
        counts: tables of `value` and `count`; each value in one of them.

    Returns:
        `value` String and `count` Int64; the id in line i has row `FIRST_ROW + i`.
    """
    kept = _empty()
    for table in counts:
        table = table.select(pl.col(VALUE), pl.col(COUNT).cast(pl.Int64))
        kept = pl.concat([kept, table.filter(pl.col(COUNT) >= field.min_count)])
        if field.max_size is not None and len(kept) > 2 * field.max_size:
            kept = _sorted(kept).head(field.max_size)
    kept = _sorted(kept)
    return kept if field.max_size is None else kept.head(field.max_size)


def _empty() -> pl.DataFrame:
    return pl.DataFrame(schema={VALUE: pl.String, COUNT: pl.Int64})


def _sorted(table: pl.DataFrame) -> pl.DataFrame:
    return table.sort([COUNT, VALUE], descending=[True, False])


def hashed(frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """Typed rows with `hashes` for the ids of vocabularies in cells that may hold several."""
    return frame.with_columns(
        pl.col(name).list.eval(pl.element().hash(_SEED))
        for name, field in schema.ids.items()
        if isinstance(field, Vocabulary) and field.separator is not None
    )


def hashes(ids: pl.Series) -> pl.Series:
    """A 64-bit hash of each id of a vocabulary; null stays null."""
    return ids.hash(_SEED).set(ids.is_null(), None)


class RowsOfIds:
    """Finds the row of an id.

    Holds a 64-bit hash of each id in a hash table, not the texts. Ids of the vocabulary are known
    to have different hashes; one that is not in it has the hash of one that is with a chance of
    size / 2^64.

    Args:
        values: String, the vocabulary.

    Raises:
        ValueError: an id stands there twice.

    Attributes:
        takes_hashes: whether `hashes` will do as well. Not where they are the same
            for two ids of the vocabulary, whose chance is size^2 / 2^65.
    """

    def __init__(self, values: pl.Series) -> None:
        self.size = len(values)
        self._seed = _SEED
        self._index = pd.Index(values.hash(self._seed).to_numpy())
        if not self._index.is_unique and not values.is_unique().all():
            raise ValueError("an id stands twice in a vocabulary")
        while not self._index.is_unique:
            self._seed += 1
            self._index = pd.Index(values.hash(self._seed).to_numpy())
        self.takes_hashes = self._seed == _SEED

    def __call__(self, ids: pl.Series) -> np.ndarray:
        """Row of each id, String or its hash, or null: `[n]` int64."""
        hashes = ids.fill_null(0) if ids.dtype == pl.UInt64 else ids.hash(self._seed)
        # -1 stands for what is not in the index, which makes UNSEEN_ROW of it.
        rows = self._index.get_indexer(hashes.to_numpy()) + FIRST_ROW
        if ids.null_count():
            rows[ids.is_null().to_numpy()] = MISSING_ROW
        return rows
