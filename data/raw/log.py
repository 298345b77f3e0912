"""A raw log: reads its files in order, as chunks of rows with the types of the schema."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stampede import stores
from stampede.data.errors import DataError, UnfinishedFileError
from stampede.data.formulas import (
    BOOLEANS,
    LARGEST_WHOLE,
    Typed,
    stripped,
    too_coarse,
    written_alike,
)
from stampede.data.missing import marks_in_bags
from stampede.data.parallel import computed_ahead
from stampede.data.progress import RowProgress
from stampede.data.raw.files import Stretch
from stampede.data.raw.formats import WHOLE, Delimited, Parquet, is_parquet, suffix_of
from stampede.data.raw.rows import BadRow, BadRows, RawRows
from stampede.data.raw.typed import LABEL, TIME, WEIGHT, Labels, label_column, typed_columns
from stampede.data.schema.schema import Quantiles, Schema, TimePart


def labels_of(frame: pl.DataFrame, goals: Sequence[str]) -> np.ndarray:
    """Labels of typed rows, `[n]` or, with several goals, `[n, goals]` float32, NaN if missing."""
    if not goals:
        return frame[LABEL].to_numpy()
    missing = np.full(len(frame), np.nan, np.float32)
    columns = [label_column(goal) for goal in goals]
    found = [frame[one].to_numpy() if one in frame.columns else missing for one in columns]
    return np.stack(found, 1)


def has_soft_labels(frame: pl.DataFrame, schema: Schema) -> bool:
    """Whether some labels of typed rows are between 0 and 1."""
    labels = labels_of(frame, schema.goals)
    return bool(((labels > 0) & (labels < 1)).any())


@dataclass(frozen=True)
class Chunk:
    """Some typed rows.

    The frame has one column per id field and number of the schema, null where missing: ids of
    vocabularies and hashes String, raw integers Int64, lists of these where a cell holds several,
    numbers Float64; `#weights:FIELD`, lists of Float64; `#label`, or `#label:GOAL` of each goal
    with nulls where it is missing, and, if the log has them, `#weight` Float32, `#time` Int64
    seconds since 1970, `#split` String.
    """

    frame: pl.DataFrame
    file: int
    numbers: np.ndarray  # `[n]` number of each row within its file, from 0, bad rows counted
    position: int  # bytes read of all files so far

    def take(self, mask: np.ndarray) -> Chunk:
        """The rows where `mask` holds."""
        if mask.all():
            return self
        frame = self.frame.filter(pl.Series(mask))
        return Chunk(frame, self.file, self.numbers[mask], self.position)


class RawLog:
    """Files of one schema and format, read one after another.

    Args:
        split_column: another column to read as text.
        bad_values_are_missing: whether a bad value of an input becomes null; else its row is bad.
        is_scored: whether a row may lack its label, which is null then.
    """

    def __init__(
        self,
        schema: Schema,
        files: Sequence[Path],
        split_column: str | None = None,
        bad_values_are_missing: bool = False,
        is_scored: bool = False,
    ) -> None:
        self.schema, self._is_scored = schema, is_scored
        self.files = list(files)
        self._split_column = split_column
        self._bad_values_are_missing = bad_values_are_missing
        self._used = schema.used_columns() | ({split_column} if split_column else set())
        self._counts: list[int] | None = None
        self._sizes = [_size(file) for file in self.files]
        self.bytes = sum(self._sizes)

    def counts(self, most: int | None = None) -> list[int]:
        """Rows of each file, bad ones included; of the first `most` rows only."""
        if self._counts is None or most is not None:
            counts, before = [0] * len(self.files), 0
            with RowProgress("counting rows", self.bytes) as progress:
                for number, (file, size) in enumerate(zip(self.files, self._sizes, strict=True)):
                    left = math.inf if most is None else most - sum(counts)
                    for rows, position in self._kind(number).count(file):
                        counts[number] = min(rows, left)
                        progress.advance_to(before + position)
                        if rows >= left:
                            break
                    before += size
            self._counts = counts
        return self._counts

    def count(self, file: int) -> int:
        """Rows of one file, bad ones included."""
        *_, (rows, _) = self._kind(file).count(self.files[file])
        return rows

    def stretches(self, file: int, most: int) -> list[Stretch]:
        """Stretches of a file, see `Delimited.stretches`."""
        return self._kind(file).stretches(self.files[file], most)

    def survey(self, file: int, stretch: Stretch) -> tuple[int, bool]:
        """Rows of a stretch, and whether it can be read by itself."""
        return self._kind(file).survey(self.files[file], stretch)

    def _kind(self, file: int) -> Delimited | Parquet:
        return _format_of(self.schema, self.files[file], self._split_column)

    def check_unchanged(self) -> None:
        """Raise an `UnfinishedFileError` if a file has grown since reading began."""
        for file, before in zip(self.files, self._sizes, strict=True):
            now = _size(file, anew=True)
            if now != before:
                raise UnfinishedFileError(
                    f"{file}: had {before:,} bytes when reading began and has {now:,} "
                    "now; wait until the file is complete, then rerun"
                )

    def first_time(self) -> int | None:
        """The smallest time among the first rows, in seconds since 1970; None without rows."""
        with closing(self.chunks(BadRows("skip"))) as chunks:
            first = next(chunks, None)
        return None if first is None else first.frame[TIME].min()

    def check_rows(self, counts: Sequence[int]) -> None:
        """Raise a `DataError` if the log has no rows; `counts` are those of each file."""
        if not any(counts):
            if isinstance(self._kind(0), Parquet):
                raise DataError(f"{self.files[0]}: has no rows; write the path of the click log")
            raise DataError(
                f"{self.files[0]}: is empty, or has only a header line; write the path of the "
                "click log, or, if line 1 is a row, name the columns in the schema, as in "
                "`columns: [label, user, item]`"
            )

    def labels(self) -> list[Labels]:
        """For each goal, what `chunks` has found of its labels."""
        return [Labels(goal, label) for goal, label in self.schema.label.items()]

    def chunks(
        self,
        bad_rows: BadRows,
        only: tuple[int, Stretch] | None = None,
        labels: Sequence[Labels] | None = None,
    ) -> Iterator[Chunk]:
        """All rows, in order.

        Args:
            only: number of the one file to read, and the stretch of it.
            labels: notes what is found, see `labels`.

        Raises:
            DataError: a file cannot be used, or has a bad row and `bad_rows` refuses it.
        """
        before = 0
        labels = self.labels() if labels is None else labels
        for number, file in enumerate(self.files):
            if only is not None and only[0] != number:
                continue
            kind, stretch = self._kind(number), WHOLE if only is None else only[1]

            def convert(piece: Any, kind: Delimited | Parquet = kind) -> RawRows:
                return self._typed(kind.rows(piece, self._used))

            # Closed here, not by the garbage collector, which would deadlock if it joined these
            # threads while another thread starts. Two pieces at a time keep all cores busy.
            with (
                closing(kind.pieces(file, self._used, stretch)) as pieces,
                closing(computed_ahead(convert, pieces, 2, threads=2)) as parsed,
            ):
                for rows in parsed:
                    bad_rows.marks += rows.marks
                    bad_rows.values += rows.values
                    bad_rows.whole += rows.whole
                    bad_rows.rounded += rows.rounded
                    bad_rows.report(rows.bad)
                    frame = rows.frame
                    for one in labels:
                        frame = one.checked(frame, file)
                    yield Chunk(frame, number, rows.numbers, before + rows.position)
            before += self._sizes[number]

    def _typed(self, raw: RawRows) -> RawRows:
        """Convert the good rows to the types of the schema; see `Chunk`.

        Other rows are added to the bad ones.
        """
        try:
            frame, whole = self._with_ids_alike(raw)
            columns = typed_columns(self.schema, self._split_column, frame.schema)
        except DataError as failure:
            raise DataError(f"{raw.file}: {failure}") from None
        checked = {name: one for name, one in columns.items() if one.is_bad is not None}
        # In one query, which computes common parts of values and checks once.
        found = frame.lazy().select(
            *(one.values.alias(name) for name, one in columns.items()),
            *(one.is_bad.fill_null(False).alias(f"?{name}") for name, one in checked.items()),
        )
        found = found.collect()
        taken: Counter[str] = Counter()
        # Only the first bad value of a row is reported.
        first: dict[int, Typed] = {}
        for name, one in checked.items():
            is_bad = found[f"?{name}"]
            of_training = name == WEIGHT or name.startswith(LABEL)
            if self._is_scored and name.startswith(LABEL):
                text = frame.select(stripped(one.column, frame.schema[one.column])).to_series()
                is_bad &= text.is_not_null()
            if self._bad_values_are_missing and not of_training:
                # A column that feeds several inputs counts once.
                taken[one.column] = max(taken[one.column], is_bad.sum())
            elif is_bad.any():
                first = dict.fromkeys(is_bad.arg_true().to_list(), one) | first
        frame = found.select(*columns)
        marks = raw.marks + marks_in_bags(raw.frame, self.schema)
        rounded = self._rounded(raw.frame, frame)
        done = replace(raw, frame=frame, values=+taken, marks=marks, whole=whole, rounded=rounded)
        if not first:
            return done
        bad = []
        for index, text in zip(first, raw.row_texts(list(first)), strict=True):
            one, line = first[index], int(raw.lines[index])
            value = raw.frame[one.column][index]
            shown = "nothing" if value is None else repr(value)
            remedy = one.remedy_of(value, raw.frame[one.beside or one.column][index])
            bad.append(BadRow(raw.file, line, one.column, shown, remedy, text))
        kept = np.delete(np.arange(len(frame)), list(first))
        return replace(done, frame=frame[kept], numbers=raw.numbers[kept], bad=[*raw.bad, *bad])

    def _rounded(self, given: pl.DataFrame, typed: pl.DataFrame) -> Counter[str]:
        """Count the whole numbers that differ as float32, by column."""
        changed: Counter[str] = Counter()
        for name, column in self.schema.sources().items():
            field = self.schema.ids.get(name)
            largest = (
                None if field and not isinstance(field, Quantiles) else typed[name].abs().max()
            )
            if largest is not None and largest > LARGEST_WHOLE[pl.Float32]:
                value = stripped(column, given.schema[column]).cast(pl.Float64, strict=False)
                exact = given.select(value).to_series()
                changed[column] = int(((exact % 1 == 0) & (exact != typed[name])).sum())
        return +changed

    def _with_ids_alike(self, raw: RawRows) -> tuple[pl.DataFrame, Counter[str]]:
        """The rows with each id in one form, whatever its type; see `written_alike`."""
        changed: Counter[str] = Counter()
        # A search of all the text at once is much faster than one of each column.
        if raw.text is not None and not _has_forms(raw.text):
            return raw.frame, changed
        names = self.schema.id_columns() | {self._split_column} - {None}
        columns = []
        for name in sorted(names):
            ids = raw.frame[name]
            kind = ids.dtype.inner if isinstance(ids.dtype, pl.List | pl.Array) else ids.dtype
            if not (kind == pl.String or kind.is_float() or kind.is_decimal()):
                continue
            coarse = too_coarse(ids.explode() if kind != ids.dtype else ids)
            if coarse.any():
                raise DataError(
                    f"column {name} holds ids above {LARGEST_WHOLE[kind]:,} but is stored as "
                    f"{kind}, which cannot tell them from their neighbours; store it as whole "
                    "numbers (Int64) or as text"
                )
            ids, cells = written_alike(ids)
            columns.append(ids)
            changed[name] += cells
        return raw.frame.with_columns(columns), +changed


def _has_forms(text: bytes) -> bool:
    """Whether some cells of a text may be other forms of ids, see `written_alike`."""
    # A letter is found twenty times as fast as a word.
    may_be_booleans = b"T" in text or b"F" in text
    return (b"." in text and b".0" in text) or (
        may_be_booleans and any(one.encode() in text for one in BOOLEANS)
    )


def scoring_log(
    schema: Schema,
    files: Sequence[Path],
    with_label: bool = True,
    bad_values_are_missing: bool = False,
) -> RawLog:
    """A log to score, with a schema of the columns to read; the model may not need them all.

    Args:
        schema: that the model was trained with.
        files: in order; the first one decides which columns the log has.
        with_label: whether to read label and weight if the log has them.
    """
    used = {label.column for label in schema.label.values()}
    columns = _format_of(schema, files[0]).names(files[0], used)
    wanted: Set[str] = set(columns) if with_label else set()
    is_timed = any(isinstance(field, TimePart) for field in schema.ids.values())
    meaning = schema.model_copy(
        update={
            "columns": list(columns) if schema.columns else [],
            "label": {n: label for n, label in schema.label.items() if label.column in wanted},
            "weight": schema.weight if schema.weight in wanted else None,
            # Other times only divide a log into parts.
            "time": schema.time if is_timed else None,
        }
    )
    return RawLog(meaning, files, bad_values_are_missing=bad_values_are_missing, is_scored=True)


def _format_of(schema: Schema, file: Path, split_column: str | None = None) -> Delimited | Parquet:
    json, labels = schema.json_columns(), schema.label_columns()
    # Where a label is one of some texts, numbers are no values.
    labels -= schema.label_texts()
    if schema.format == "parquet" or (schema.format == "auto" and is_parquet(file)):
        return Parquet(schema.missing, json, labels)
    separator = schema.separator
    if separator == "auto":
        separator = "\t" if suffix_of(file) in (".tsv", ".txt", ".tab") else ","
    numeric = schema.numeric_columns() - {split_column}
    return Delimited(separator, schema.quote, schema.columns, numeric, schema.missing, json, labels)


def _size(file: Path, anew: bool = False) -> int:
    try:
        return stores.length(file, anew)
    except OSError as failure:
        raise DataError(
            f"{file}: cannot be read ({failure.strerror or failure}); check its path and "
            "permissions"
        ) from None
