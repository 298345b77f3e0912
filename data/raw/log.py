"""A raw log: reads its files in order, as chunks of rows with the types of the schema."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from stampede import stores
from stampede.data.errors import DataError, UnfinishedFileError
from stampede.data.formulas import (
    BOOLEANS,
    JSON,
    LARGEST,
    LARGEST_WHOLE,
    REMEDY_OF_JSON,
    UNITS,
    id_texts,
    number_of,
    part_of_time,
    remedy_of_time,
    remedy_of_weights,
    seconds_of_time,
    stripped,
    too_coarse,
    weights_of_ids,
    written_alike,
)
from stampede.data.missing import marks_in_bags
from stampede.data.parallel import computed_ahead
from stampede.data.progress import RowProgress
from stampede.data.raw.formats import Delimited, Parquet, is_parquet, suffix_of
from stampede.data.raw.rows import BadRow, BadRows, RawRows
from stampede.data.schema.schema import (
    IdField,
    Integers,
    Label,
    Quantiles,
    Schema,
    TimePart,
    column_of_weights,
    number_as_text,
    weights_column,
)

LABEL, WEIGHT, TIME, SPLIT = "#label", "#weight", "#time", "#split"


def label_column(goal: str) -> str:
    """Name of the typed column of a goal's labels; a single label has the goal ""."""
    return f"{LABEL}:{goal}" if goal else LABEL


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
    """

    def __init__(
        self,
        schema: Schema,
        files: Sequence[Path],
        split_column: str | None = None,
        bad_values_are_missing: bool = False,
    ) -> None:
        self.schema = schema
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
                    kind = _format_of(self.schema, file, self._split_column)
                    for rows, position in kind.count(file):
                        counts[number] = min(rows, left)
                        progress.advance_to(before + position)
                        if rows >= left:
                            break
                    before += size
            self._counts = counts
        return self._counts

    def count(self, file: int) -> int:
        """Rows of one file, bad ones included."""
        kind = _format_of(self.schema, self.files[file], self._split_column)
        *_, (rows, _) = kind.count(self.files[file])
        return rows

    def check_unchanged(self) -> None:
        """Raise an `UnfinishedFileError` if a file has grown since reading began."""
        for file, before in zip(self.files, self._sizes, strict=True):
            if _size(file) != before:
                raise UnfinishedFileError(
                    f"{file}: had {before:,} bytes when reading began and has {_size(file):,} "
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
            raise DataError(
                f"{self.files[0]}: is empty, or has only a header line; write the path of the "
                "click log, or, if line 1 is a row, name the columns in the schema, as in "
                "`columns: [label, user, item]`"
            )

    def labels(self) -> list[Labels]:
        """For each goal, what `chunks` has found of its labels."""
        return [Labels(goal, label) for goal, label in self.schema.label.items()]

    def chunks(
        self, bad_rows: BadRows, only: int | None = None, labels: Sequence[Labels] | None = None
    ) -> Iterator[Chunk]:
        """All rows, in order.

        Args:
            only: number of the one file to read.
            labels: notes what is found, see `labels`.

        Raises:
            DataError: a file cannot be used, or has a bad row and `bad_rows` refuses it.
        """
        before = 0
        labels = self.labels() if labels is None else labels
        for number, file in enumerate(self.files):
            if only not in (None, number):
                continue
            kind = _format_of(self.schema, file, self._split_column)

            def convert(piece: Any, kind: Delimited | Parquet = kind) -> RawRows:
                return self._typed(kind.rows(piece, self._used))

            # Closed here, not by the garbage collector, which would deadlock if it joined these
            # threads while another thread starts. Two pieces at a time keep all cores busy.
            with (
                closing(kind.pieces(file, self._used)) as pieces,
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
            columns = _columns(self.schema, self._split_column, frame.schema)
        except DataError as failure:
            raise DataError(f"{raw.file}: {failure}") from None
        checked = [column for column in columns if column.is_bad is not None]
        # In one query, which computes common parts of values and checks once.
        found = frame.lazy().select(
            *(column.values.alias(column.name) for column in columns),
            *(column.is_bad.fill_null(False).alias(f"?{column.name}") for column in checked),
        )
        found = found.collect()
        taken: Counter[str] = Counter()
        # Only the first bad value of a row is reported.
        first: dict[int, _Typed] = {}
        for column in checked:
            is_bad = found[f"?{column.name}"]
            of_training = column.name == WEIGHT or column.name.startswith(LABEL)
            if self._bad_values_are_missing and not of_training:
                # A column that feeds several inputs counts once.
                taken[column.column] = max(taken[column.column], is_bad.sum())
            elif is_bad.any():
                first = dict.fromkeys(is_bad.arg_true().to_list(), column) | first
        frame = found.select(column.name for column in columns)
        marks = raw.marks + marks_in_bags(raw.frame, self.schema)
        rounded = self._rounded(raw.frame, frame)
        done = replace(raw, frame=frame, values=+taken, marks=marks, whole=whole, rounded=rounded)
        if not first:
            return done
        bad = []
        for index, text in zip(first, raw.row_texts(list(first)), strict=True):
            column, line = first[index], int(raw.lines[index])
            value = raw.frame[column.column][index]
            shown = "nothing" if value is None else repr(value)
            remedy = column.remedy
            if not isinstance(remedy, str):
                others = [raw.frame[column.beside][index]] if column.beside else []
                remedy = remedy(value, *others)
            bad.append(BadRow(raw.file, line, column.column, shown, remedy, text))
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
        if self.schema.rules == 1 or (raw.text is not None and not _has_forms(raw.text)):
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
            ids, cells = written_alike(ids, self.schema.rules)
            columns.append(ids)
            changed[name] += cells
        return raw.frame.with_columns(columns), +changed


def _has_forms(text: bytes) -> bool:
    """Whether some cells of a text may be other forms of ids, see `written_alike`."""
    # A letter is found much faster than a word.
    may_be_booleans = b"T" in text or b"F" in text
    return b".0" in text or (may_be_booleans and any(one.encode() in text for one in BOOLEANS))


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
    return RawLog(meaning, files, bad_values_are_missing=bad_values_are_missing)


def _format_of(schema: Schema, file: Path, split_column: str | None = None) -> Delimited | Parquet:
    if schema.format == "parquet" or (schema.format == "auto" and is_parquet(file)):
        return Parquet(schema.missing)
    separator = schema.separator
    if separator == "auto":
        separator = "\t" if suffix_of(file) in (".tsv", ".txt", ".tab") else ","
    numeric = schema.numeric_columns() - {split_column}
    return Delimited(separator, schema.quote, schema.columns, numeric, schema.missing)


def _size(file: Path) -> int:
    try:
        return stores.length(file)
    except OSError as failure:
        raise DataError(
            f"{file}: cannot be read ({failure.strerror or failure}); check its path and "
            "permissions"
        ) from None


class _Typed(NamedTuple):
    """A typed column made of a column of the file."""

    name: str
    column: str
    values: pl.Expr  # null where an input's value is bad
    is_bad: pl.Expr | None  # whether a row's value is bad; null counts as good
    # What to write, or a function of the bad value, and of that in the column `beside`.
    remedy: str | Callable[..., str]
    beside: str | None = None


def _columns(schema: Schema, split_column: str | None, types: pl.Schema) -> list[_Typed]:
    columns = []
    for goal, label in schema.label.items():
        columns.append(typed_label(label, types, schema.rules, goal))
    for name, field in schema.numbers.items():
        columns.append(_number(name, field.column or name, types, schema.rules))
    for name, field in schema.ids.items():
        columns.append(_ids(name, field, schema, types))
        if weights_column(field) is not None:
            columns.append(_weights(name, field, schema, types))
    if schema.weight is not None:
        value = _float(schema.weight, types, schema.rules)
        bad = ~value.is_between(0, LARGEST).fill_null(False)
        remedy = f"write a number from 0 to {LARGEST:.1e}"
        columns.append(_Typed(WEIGHT, schema.weight, value.cast(pl.Float32), bad, remedy))
    if schema.time is not None:
        column, form = schema.time.column, schema.time.format
        seconds = _seconds(schema, types)
        form = "" if types[column].is_temporal() else form
        remedy = partial(remedy_of_time, column=column, format=form)
        columns.append(_Typed(TIME, column, seconds, seconds.is_null(), remedy))
    if split_column is not None:
        kind, text = types[split_column], pl.col(split_column).cast(pl.String)
        _check_type(split_column, kind, "text", _is_text(kind))
        columns.append(_Typed(SPLIT, split_column, text, None, ""))
    return columns


# Texts of labels, in any case.
_YES, _NO = ["true", "yes", "t", "y"], ["false", "no", "f", "n"]


def typed_label(label: Label, types: pl.Schema, rules: int, goal: str = "") -> _Typed:
    """A column of labels: 0, 1, a soft label between them, or -1, which `Labels` turns into 0.

    An empty cell is bad, but that of one of several goals is null: its label is missing.
    """
    column, kind = label.column, types[label.column]
    if label.positive:
        _check_type(column, kind, "a label", _is_text(kind))
        text, positive = pl.col(column).cast(pl.String), label.positive
        if rules > 1:
            # As the cells are.
            positive = written_alike(pl.Series(positive, dtype=pl.String), rules)[0].to_list()
        value, bad, remedy = text.is_in(positive), text.is_null(), "write a value"
    elif label.at_least is not None:
        value = _float(column, types, rules)
        bad = ~value.is_finite().fill_null(False)
        least = label.at_least if rules == 1 else float(np.float32(label.at_least))
        value, remedy = value >= least, "write a number"
    else:
        value = _float(column, types, rules)
        if kind == pl.String:
            word = pl.col(column).str.strip_chars().str.to_lowercase()
            is_word = pl.when(word.is_in(_YES)).then(1.0).when(word.is_in(_NO)).then(0.0)
            value = pl.coalesce(value, is_word)
        bad = ~(value.is_between(0.0, 1.0) | (value == -1.0)).fill_null(False)
        remedy = partial(_remedy_of_label, column=column, goal=goal)
    if goal:
        bad = bad & stripped(column, kind).is_not_null()
    return _Typed(label_column(goal), column, value.cast(pl.Float32), bad, remedy)


def _remedy_of_label(value: Any, column: str, goal: str) -> str:
    """What to write instead of a bad label."""
    if value is None:
        return "write 0 or 1"
    is_text = isinstance(value, str)
    shown = json.dumps(value, ensure_ascii=False) if is_text else number_as_text(value)
    key = goal or "label"
    rules = [f"`{key}: {{column: {column}, positive: [{shown}]}}` in the schema if it is a click"]
    if not isinstance(value, str):
        rules.append(f"`{key}: {{column: {column}, at_least: {shown}}}`")
    return f"write 0 or 1, or {', or '.join(rules)}"


class Labels:
    """Turns labels -1 of a goal into 0; refuses them beside labels other than 1."""

    def __init__(self, goal: str, label: Label) -> None:
        self._name, self._label = label_column(goal), label
        self._has_minus, self._other = False, None

    def checked(self, frame: pl.DataFrame, file: Path) -> pl.DataFrame:
        """Rows with labels from 0 to 1."""
        if self._label.positive or self._label.at_least is not None:
            return frame
        label = frame[self._name]
        is_minus = label == -1
        others = label.filter(~is_minus & (label != 1))
        self._note(bool(is_minus.any()), others[0] if len(others) else None, file)
        return frame.with_columns(label.set(is_minus, 0.0)) if is_minus.any() else frame

    def add(self, other: Labels, file: Path) -> None:
        """Note what was found in a file that another process has read."""
        self._note(other._has_minus, other._other, file)

    def _note(self, has_minus: bool, other: float | None, file: Path) -> None:
        self._has_minus |= has_minus
        self._other = other if self._other is None else self._other
        if self._has_minus and self._other is not None:
            column = self._label.column
            raise DataError(
                f"{file}: column {column}: found labels -1 and {self._other:g}, so it is not clear "
                f"which of them are clicks; write `label: {{column: {column}, positive: [1]}}` in "
                "the schema, or other values"
            )


def _float(column: str, types: pl.Schema, rules: int) -> pl.Expr:
    """Float64, see `number_of`; null for empty cells and for text that is not a number."""
    _check_type(column, types[column], "a number", _is_numeric(types[column]))
    return number_of(column, types[column], rules)


def _seconds(schema: Schema, types: pl.Schema) -> pl.Expr:
    column = schema.time.column
    kind = types[column]
    # A float32 is too coarse: it has a value every two minutes.
    serves = kind in (pl.Date, pl.Datetime, pl.String) or kind.is_integer()
    if schema.time.format in UNITS:
        serves |= kind == pl.Float64 or kind.is_decimal()
    _check_type(column, kind, "a time", serves)
    return seconds_of_time(column, kind, schema.time.format, schema.rules)


def _is_bad(column: str, types: pl.Schema, is_good: pl.Expr) -> pl.Expr:
    """Whether a cell has a value, and a bad one."""
    return stripped(column, types[column]).is_not_null() & ~is_good.fill_null(False)


def _number(name: str, column: str, types: pl.Schema, rules: int) -> _Typed:
    value = _float(column, types, rules)
    bad = _is_bad(column, types, value.abs() <= LARGEST)
    remedy = f"write a finite number up to {LARGEST:.1e}, or leave the cell empty"
    return _Typed(name, column, pl.when(~bad).then(value), bad, remedy)


def _ids(name: str, field: IdField, schema: Schema, types: pl.Schema) -> _Typed:
    if isinstance(field, TimePart):
        part = part_of_time(_seconds(schema, types), field.encode)
        # Bad times are reported for the time column itself.
        return _Typed(name, schema.time.column, part, None, "")
    column = field.column or name
    if isinstance(field, Quantiles):
        return _number(name, column, types, schema.rules)
    kind, purpose = types[column], f"an id (lists need ids.{name}.separator)"
    one = kind
    if field.separator is not None:
        one, purpose = kind.inner if isinstance(kind, pl.List | pl.Array) else kind, "ids"
    _check_type(column, kind, purpose, _is_text(one))
    cells = id_texts(
        column, kind, field.separator, field.max_ids, schema.missing, schema.rules, field.keep
    )
    no_list = None
    if field.separator == JSON and kind == pl.String:
        no_list = _is_bad(column, types, cells.is_not_null())
    if not isinstance(field, Integers):
        return _Typed(name, column, cells, no_list, REMEDY_OF_JSON)
    remedy = f"write whole numbers from 0 to {field.size - 1} (ids.{name}.size)"

    def whole(text: pl.Expr) -> pl.Expr:
        return text.str.strip_chars().cast(pl.Int64, strict=False)

    def is_good(number: pl.Expr) -> pl.Expr:
        return number.is_between(0, field.size - 1).fill_null(False)

    if field.separator is None:
        numbers = whole(cells)
        bad = _is_bad(column, types, is_good(numbers))
        return _Typed(name, column, pl.when(~bad).then(numbers), bad, remedy)
    numbers = cells.list.eval(whole(pl.element()))
    bad = numbers.list.eval(~is_good(pl.element())).list.any().fill_null(False)
    if no_list is not None:
        bad, remedy = bad | no_list, f"{remedy}, as a JSON list"
    good = numbers.list.eval(pl.element().filter(is_good(pl.element())))
    return _Typed(name, column, good, bad, remedy)


def _weights(name: str, field: IdField, schema: Schema, types: pl.Schema) -> _Typed:
    """The weights of a field's ids."""
    column, ids = field.weights, field.column or name
    kind = types[column]
    one = kind.inner if isinstance(kind, pl.List | pl.Array) else kind
    _check_type(column, kind, "a list of numbers", _is_numeric(one))
    is_id = None
    if isinstance(field, Integers):
        most = field.size - 1

        def is_id(text: pl.Expr) -> pl.Expr:
            number = text.str.strip_chars().cast(pl.Int64, strict=False)
            return number.is_between(0, most).fill_null(False)

    kept = field.max_ids, schema.missing, schema.rules, field.keep
    of_ids = ids, types[ids], field.separator, *kept, is_id
    values, bad = weights_of_ids(column, kind, *of_ids)
    remedy = partial(remedy_of_weights, separator=field.separator, column=ids)
    return _Typed(column_of_weights(name), column, values, bad, remedy, beside=ids)


def _is_numeric(kind: pl.DataType) -> bool:
    return kind.is_numeric() or kind in (pl.String, pl.Boolean, pl.Null)


def _is_text(kind: pl.DataType) -> bool:
    """Whether all values can be written as text."""
    return _is_numeric(kind) or kind in (pl.Date, pl.Datetime, pl.Time)


def _check_type(column: str, kind: pl.DataType, purpose: str, serves: bool) -> None:
    """Refuse a column whose type does not serve its purpose."""
    if not serves:
        raise DataError(
            f"column {column} is stored as {kind}, which is not {purpose}; convert it, or "
            "name another column in the schema"
        )
