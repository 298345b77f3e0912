"""Logs and prepared folders as pieces of typed rows that are described alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import polars as pl
import pyarrow

from stampede.data.description.statistics import IdColumn
from stampede.data.errors import DataError
from stampede.data.learning.counts import VALUE
from stampede.data.learning.vocabulary import FIRST_ROW
from stampede.data.preparation import LEARNED_FOLDER
from stampede.data.prepared.manifest import PARTS, FieldEntry, ShardEntry, read_manifest
from stampede.data.progress import RowProgress
from stampede.data.raw import BadRows
from stampede.data.raw.typed import LABEL, TIME
from stampede.data.schema.columns import Hashed, IdField, Integers, Quantiles, TimePart
from stampede.data.sources import Source
from stampede.data.splits import Assignment

_PIECE_ROWS = 1 << 18


class Piece(NamedTuple):
    """Some rows.

    Attributes:
        frame: a column per id field and number, null where missing, lists where there may be
            several ids; `#label` and where known `#time`.
        parts: `[n]` int8, number of each row's part.
        position: bytes read so far.
    """

    frame: pl.DataFrame
    parts: np.ndarray
    position: int


class Described(Protocol):
    """What can be described.

    Attributes:
        ids: its id fields, in order.
        kinds: by id field, a word for its kind.
        numbers: its numbers, in order.
        unseen_rows: by id field, the value that stands for ids that the training part lacks,
            where there is one.
        filled: whether missing numbers were filled.
        bytes: of all its files.
    """

    ids: Sequence[str]
    kinds: Mapping[str, str]
    numbers: Sequence[str]
    unseen_rows: Mapping[str, int]
    filled: bool
    bytes: int

    def pieces(self) -> Iterator[Piece]:
        """All rows, in order."""
        ...

    def texts(self, column: IdColumn) -> list[str]:
        """The most frequent ids of a column, as a person knows them."""
        ...

    def notes(self) -> list[str]:
        """What a reader of the description has to know; complete after `pieces`."""
        ...


class RawInput:
    """A raw log.

    Args:
        source: the log and its division.
        bad_rows: what happens to bad rows.
        limit: first rows that are looked at, bad ones included; None: all.
    """

    def __init__(self, source: Source, bad_rows: BadRows, limit: int | None) -> None:
        self._source = source
        self._log = source.log
        self._bad_rows = bad_rows
        self._limit = limit
        fields = self._log.schema.ids
        # What is cut into quantiles is a number to whoever looks at it.
        quantiles = [name for name, field in fields.items() if isinstance(field, Quantiles)]
        self.ids = [name for name in fields if name not in quantiles]
        self.numbers = [*self._log.schema.numbers, *quantiles]
        self.kinds = {name: _kind(fields[name]) for name in self.ids}
        self.unseen_rows: dict[str, int] = {}
        self.filled = False
        self.bytes = self._log.bytes

    def pieces(self) -> Iterator[Piece]:
        """All rows, in order.

        Raises:
            DataError: a row is bad, and such rows are not to be left out.
        """
        source = self._source
        counts = self._counts() if source.split.needs_counts() else None
        assignment = Assignment(source.split, counts, source.test_share, source.file_parts)
        seen = [0] * len(self._log.files)
        for chunk in self._log.chunks(self._bad_rows):
            if not len(chunk.numbers):
                continue
            if self._limit is not None:
                chunk = chunk.take(chunk.numbers < self._limit - sum(seen[: chunk.file]))
            seen[chunk.file] = int(chunk.numbers[-1]) + 1
            yield Piece(chunk.frame, assignment.parts(chunk), chunk.position)
            if sum(seen) == self._limit:
                return

    def texts(self, column: IdColumn) -> list[str]:
        """The most frequent ids of a column."""
        return [str(value) for value in column.top]

    def notes(self) -> list[str]:
        """What a reader of the description has to know."""
        notes = [f"parts: split {self._source.split.split}, see --set"]
        if self._limit is not None:
            notes.append(f"only the first {self._limit:,} rows were looked at (--rows)")
        if self._bad_rows.count:
            notes.append(f"{self._bad_rows.count:,} bad rows were left out and written aside")
        return notes

    def _counts(self) -> list[int]:
        """Rows of each file, as far as they are looked at."""
        if self._limit is None:
            with RowProgress("counting rows", self._log.bytes) as progress:
                return self._log.counts(progress.advance_to)
        # Not the whole log for its first rows.
        counts = [0] * len(self._log.files)
        for chunk in self._log.chunks(BadRows("skip")):
            if len(chunk.numbers):
                counts[chunk.file] = int(chunk.numbers[-1]) + 1
            excess = sum(counts) - self._limit
            if excess >= 0:
                counts[chunk.file] -= excess
                break
        return counts


class PreparedInput:
    """A prepared folder; its arrays are memory-mapped.

    Args:
        folder: with a manifest.
        limit: first rows of each part that are looked at; None: all.

    Raises:
        DataError: the folder is damaged.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        self._folder = folder
        self._limit = limit
        self._manifest = manifest = read_manifest(folder)
        self.ids = [entry.name for entry in manifest.fields]
        self.numbers = list(manifest.numbers)
        self.kinds = {entry.name: "many ids" if entry.multi else "ids" for entry in manifest.fields}
        self.unseen_rows = {
            entry.name: entry.unseen_row
            for entry in manifest.fields
            if entry.unseen_row is not None
        }
        self.filled = True
        self.bytes = sum(
            file.bytes
            for shards in manifest.parts.values()
            for shard in shards
            for file in shard.files.values()
        )

    def pieces(self) -> Iterator[Piece]:
        """All rows, part by part.

        Raises:
            DataError: an array is absent or damaged.
        """
        position = 0
        for number, part in enumerate(PARTS):
            left = self._limit
            for shard in self._manifest.parts.get(part, []):
                arrays = self._arrays(shard)
                rows = shard.rows if left is None else min(shard.rows, left)
                for start in range(0, rows, _PIECE_ROWS):
                    stop = min(start + _PIECE_ROWS, rows)
                    frame = self._frame(arrays, slice(start, stop))
                    size = sum(file.bytes for file in shard.files.values())
                    parts = np.full(stop - start, number, dtype=np.int8)
                    yield Piece(frame, parts, position + size * stop // shard.rows)
                position += size
                left = None if left is None else left - rows
                if left == 0:
                    break

    def texts(self, column: IdColumn) -> list[str]:
        """The most frequent ids of a column: their texts where they were kept, else their rows."""
        name = f"{LEARNED_FOLDER}/{column.name}.parquet"
        if not any(file.name == name for file in self._manifest.learned):
            return [f"row {value}" for value in column.top]
        places = [value - FIRST_ROW for value in column.top]
        try:
            found = (
                pl.scan_parquet(self._folder / name)
                .with_row_index("place")
                .filter(pl.col("place").is_in(places))
                .collect()
            )
        except (OSError, pl.exceptions.PolarsError) as failure:
            raise DataError(
                f"{self._folder / name}: damaged ({failure}); prepare the data again"
            ) from None
        texts = dict(zip(found["place"], found[VALUE], strict=True))
        return [
            texts.get(place, f"row {value}")
            for place, value in zip(places, column.top, strict=True)
        ]

    def notes(self) -> list[str]:
        """What a reader of the description has to know."""
        notes = [
            "unseen: the row that rare ids and those the training part lacks share, or, where a "
            "field has none, rows that no training sample has",
            "numbers are as they were written, with missing ones filled",
        ]
        if self._limit is not None:
            notes.append(f"only the first {self._limit:,} rows of each part were looked at")
        if self._manifest.bad_rows:
            notes.append(f"{self._manifest.bad_rows:,} bad rows were left out in the preparation")
        return notes

    def _arrays(self, shard: ShardEntry) -> dict[str, np.ndarray]:
        arrays = {}
        for name, file in shard.files.items():
            path = self._folder / file.name
            try:
                arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as failure:
                raise DataError(f"{path}: damaged ({failure}); prepare the data again") from None
            if not name.startswith(("values", "offsets")) and len(arrays[name]) != shard.rows:
                raise DataError(
                    f"{path}: found {len(arrays[name])} rows, the manifest says {shard.rows}; "
                    "prepare the data again"
                )
        return arrays

    def _frame(self, arrays: Mapping[str, np.ndarray], rows: slice) -> pl.DataFrame:
        manifest = self._manifest
        columns = {}
        ids, numbers = np.asarray(arrays["ids"][rows]), np.asarray(arrays["numbers"][rows])
        for j, entry in enumerate(manifest.single()):
            columns[entry.name] = _null_where_missing(pl.Series(ids[:, j].copy()), entry)
        for i, entry in enumerate(manifest.multi()):
            offsets = np.asarray(arrays[f"offsets_{i}"][rows.start : rows.stop + 1])
            values = np.asarray(arrays[f"values_{i}"][offsets[0] : offsets[-1]])
            lists = pyarrow.LargeListArray.from_arrays(
                offsets - offsets[0],
                _null_where_missing(pl.Series(values), entry).to_arrow(),
            )
            columns[entry.name] = pl.from_arrow(lists)
        for j, name in enumerate(manifest.numbers):
            columns[name] = pl.Series(numbers[:, j].astype(np.float64))
        columns[LABEL] = pl.Series(np.asarray(arrays["label"][rows]))
        if manifest.has_time:
            columns[TIME] = pl.Series(np.asarray(arrays["time"][rows]))
        return pl.DataFrame(columns)


def _null_where_missing(values: pl.Series, entry: FieldEntry) -> pl.Series:
    if entry.missing_row is None:
        return values
    return values.set(values == entry.missing_row, None)


def _kind(field: IdField) -> str:
    """A word for the table."""
    if isinstance(field, TimePart):
        return field.encode.replace("_", " ")
    if isinstance(field, Hashed):
        return f"hash {field.buckets:,}"
    word = "integers" if isinstance(field, Integers) else "ids"
    return word if field.separator is None else f"many {word}"
