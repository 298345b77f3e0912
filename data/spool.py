"""Typed rows kept on disk between the two passes, so that a log is parsed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from stampede.data.learning.distinct import Distinct
from stampede.data.learning.vocabulary import hashed, hashes
from stampede.data.schema import Schema
from stampede.data.schema.columns import Quantiles

_PART, _POSITION = "#part", "#position"


class Spooled(NamedTuple):
    """Some rows, ids of vocabularies as hashes.

    Attributes:
        frame: their typed columns (see `stampede.data.raw.typed`).
        parts: `[n]` int8, part of each row.
        position: bytes of the log read up to them.
        distinct: the columns that `frame` lacks; None: it has all.
    """

    frame: pl.DataFrame
    parts: np.ndarray
    position: int
    distinct: Mapping[str, Distinct] | None = None


class Spool:
    """A folder with two files for each chunk, removed as it is read.

    Args:
        folder: a new one.
        schema: of the rows.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._numbers = [
            *schema.numbers,
            *(name for name, field in schema.ids.items() if isinstance(field, Quantiles)),
        ]
        self._count = 0
        folder.mkdir()

    def append(self, rows: Spooled) -> None:
        """Keep some typed rows, with `distinct` as `distinct_ids` gives it."""
        kept = self._narrowed(hashed(rows.frame, self._schema)).with_columns(
            *(pl.Series(name, column.codes) for name, column in rows.distinct.items()),
            pl.Series(_PART, rows.parts),
        )
        once = pl.DataFrame(
            [
                pl.Series(_POSITION, [rows.position]),
                *(
                    hashes(column.values).alias(name).implode()
                    for name, column in rows.distinct.items()
                ),
            ]
        )
        for path, frame in zip(self._paths(self._count), (kept, once), strict=True):
            frame.write_ipc(path, compression="uncompressed")
        self._count += 1

    def __iter__(self) -> Iterator[Spooled]:
        for number in range(self._count):
            paths = self._paths(number)
            frame, once = map(pl.read_ipc, paths)
            for path in paths:
                path.unlink()
            if len(frame):
                distinct = {
                    name: Distinct(once[name][0], frame[name].to_numpy())
                    for name in once.columns[1:]
                }
                rows = frame.drop(_PART, *distinct).with_columns(
                    pl.col(self._numbers).cast(pl.Float64)
                )
                yield Spooled(rows, frame[_PART].to_numpy(), once[_POSITION][0], distinct)

    def _narrowed(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Numbers in half the bytes where all of a column stay what they are."""
        narrow = {name: pl.col(name).cast(pl.Float32) for name in self._numbers}
        same = frame.select(
            (column.cast(pl.Float64) == pl.col(name)).all() for name, column in narrow.items()
        )
        return frame.with_columns(column for name, column in narrow.items() if same[name].all())

    def _paths(self, number: int) -> tuple[Path, Path]:
        return self._folder / f"{number}.arrow", self._folder / f"{number}-values.arrow"
