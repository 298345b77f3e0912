"""The file of a vocabulary, which may come from elsewhere."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from stampede.data.learning.counts import VALUE
from stampede.data.prepared.short_file import is_file

# Of the ids that a file holds, unpacked; texts are much shorter.
_BYTES_PER_ID, _MORE_BYTES = 4 << 10, 64 << 20


def read_values(path: Path, size: int | None = None) -> pl.Series:
    """The ids of a vocabulary, String, in the order of their rows.

    Args:
        size: how many there must be. A small file may unpack to far more: with it, one that says
            so is not read.

    Raises:
        OSError, KeyError, ValueError, pl.exceptions.PolarsError: it is damaged.
    """
    if not is_file(path):
        raise ValueError(f"{path.name} is no file")
    if size is not None:
        _check_size(path, size)
    try:
        values = pl.read_parquet(path, columns=[VALUE], glob=False)[VALUE]
    # No Exception: what its own checks do not see makes Polars panic.
    except pl.exceptions.PanicException as panic:
        raise ValueError(f"{path.name} cannot be read ({panic!s:.100})") from None
    if values.dtype != pl.String or values.null_count():
        raise ValueError(f"{path.name} holds {values.dtype}, {values.null_count()} of them null")
    return values


def _check_size(path: Path, size: int) -> None:
    footer = pq.read_metadata(path)
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    found = sum(group.num_rows for group in groups)
    if found != size or footer.num_rows != size:
        raise ValueError(f"{path.name} holds {found:,} ids instead of {size:,}")
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    unpacked = sum(column.total_uncompressed_size for column in columns)
    most = size * _BYTES_PER_ID + _MORE_BYTES
    if unpacked > most:
        raise ValueError(
            f"{path.name} unpacks to {unpacked:,} bytes, more than {size:,} ids can be"
        )
