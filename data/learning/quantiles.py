"""Numbers cut into buckets of equal shares."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl

from stampede.data.learning.counts import COUNT, VALUE


def edges(counts: Iterable[pl.DataFrame], buckets: int) -> list[float]:
    """Values where a new bucket begins: the inner `buckets`-quantiles, exact, ties merged.

    The j-th is the smallest value v such that a share of at least j / buckets is at most v; the
    bucket above begins after it.
    """
    tables = [table for table in counts if len(table)]
    if not tables:
        return []
    table = pl.concat(tables).sort(VALUE)
    values = table[VALUE].to_numpy()
    cumulative = np.cumsum(table[COUNT].to_numpy().astype(np.int64))
    total = int(cumulative[-1])
    # Whole numbers: ceil(j * total / buckets), without rounding.
    needed = np.array([-(-j * total // buckets) for j in range(1, buckets)], dtype=np.int64)
    found = np.unique(values[np.searchsorted(cumulative, needed)])
    return [float(edge) for edge in found if edge < values[-1]]
