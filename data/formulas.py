"""Formulas that turn the values of a log into inputs of a model.

Every exported model contains a copy of this file (see `stampede.engine.inference.packaging`), so it
imports only polars and numpy.
"""

from __future__ import annotations

import decimal
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import numpy as np
import polars as pl

HOUR, DAY, WEEK = 3600, 86400, 7
# 1970-01-01 was a Thursday; Monday is weekday 0.
THURSDAY = 3

# Formats of times as numbers: how many of them a second has.
UNITS = {"seconds": 1, "milliseconds": 1000, "microseconds": 1_000_000}

# All formats that are recognised, in the order in which they are tried.
FORMATS = (
    *UNITS, "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d", "iso8601",
    "%Y%m%d", "%Y%m%d%H",
)  # fmt: skip

# The first and the last second of the years 1990 to 2099.
FIRST_TIME, LAST_TIME = 631_152_000, 4_102_444_799

# Row 0 of a table of buckets is for missing numbers.
_FIRST_BUCKET = 1

_FNV_OFFSET, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


# The largest number that is finite as a float32, rounded down.
LARGEST = 3.4e38

# Up to here a float of this width represents every whole number.
LARGEST_WHOLE = {pl.Float32: 2**24, pl.Float64: 2**53}

# A whole number as text with a fraction of zeros.
_WHOLE = r"^(-?[1-9]\d*|0)\.0+$"

# How pandas, spreadsheets and R write what Parquet and polars have as true and false.
BOOLEANS = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}


class MarkedValues(NamedTuple):
    """The values of texts that mean a missing one, such as -999 and false.

    Attributes:
        numbers: fractions and infinities.
        words: true or false.
    """

    whole: tuple[int, ...]
    numbers: tuple[float, ...]
    words: tuple[str, ...]
    dates: tuple[str, ...]


@cache
def _values_of_marks(marks: tuple[str, ...]) -> MarkedValues:
    whole, numbers = [], []
    for mark in map(str.strip, marks):
        if re.fullmatch(r"[+-]?\d+(\.0+)?", mark):
            whole.append(int(mark.partition(".")[0]))
            continue
        with suppress(ValueError):
            number = float(mark.replace("_", "x"))
            if number.is_integer():
                whole.append(int(number))
            elif number == number:
                numbers.append(number)
    words = {BOOLEANS.get(mark, mark) for mark in marks} & set(BOOLEANS.values())
    dates = [mark for mark in marks if re.fullmatch(r"\d{4}-\d\d-\d\d", mark)]
    return MarkedValues(tuple(whole), tuple(numbers), tuple(sorted(words)), tuple(dates))


def values_of_marks(marks: Iterable[str]) -> MarkedValues:
    """The values of the texts that mean a missing one."""
    return _values_of_marks(tuple(marks))


def texts_of_marks(marks: Sequence[str]) -> list[str]:
    """Texts that mean a missing value, and others of the same value: -1.0 for -1, TRUE for true."""
    values = values_of_marks(marks)
    whole = [f"{number}{fraction}" for number in values.whole for fraction in ("", ".0")]
    words = [text for text, word in BOOLEANS.items() if word in values.words]
    return list(dict.fromkeys([*marks, *whole, *words, *values.words]))


def marked(column: pl.Series, marks: Sequence[str], is_number: bool = False) -> pl.Series | None:
    """Whether each value of a column means a missing one: its text, or what has the same value.

    So the number -1 of any type is the mark "-1", and NaN the mark "NaN". None if no value is.

    Args:
        is_number: whether texts are read as numbers.
    """
    kind, values = column.dtype, values_of_marks(marks)
    if kind == pl.String:
        found = _is_marked_text(column, marks, values)
        if is_number and (values.whole or values.numbers):
            parsed = column.str.strip_chars().cast(pl.Float64, strict=False)
            of_number = _is_marked_number(parsed, values)
            found = of_number if found is None else found | of_number
    elif kind == pl.Boolean and values.words:
        found = column.cast(pl.String).is_in(list(values.words))
    elif kind == pl.Date and values.dates:
        found = column.cast(pl.String).is_in(list(values.dates))
    elif kind.is_numeric():
        found = _is_marked_number(column, values)
        if kind.is_float() and any(mark.lower() == "nan" for mark in marks):
            found = column.is_nan() if found is None else found | column.is_nan()
    else:
        found = None
    return found if found is not None and found.any() else None


def _is_marked_text(
    column: pl.Series, marks: Sequence[str], values: MarkedValues
) -> pl.Series | None:
    texts = texts_of_marks(marks)
    if values.whole:
        return column.is_in(texts) | column.str.replace(_WHOLE, "${1}").is_in(texts)
    # In most columns all ids are longer; this is much faster than comparing them.
    shortest = column.str.len_bytes().min()
    if shortest is None or shortest > max((len(text.encode()) for text in texts), default=-1):
        return None
    return column.is_in(texts)


def _is_marked_number(column: pl.Series, values: MarkedValues) -> pl.Series | None:
    kind, found = column.dtype, []
    if kind.is_integer():
        lowest, highest = column.min(), column.max()
        near = [n for n in values.whole if lowest is not None and lowest <= n <= highest]
        return column.is_in(pl.Series(near, dtype=kind)) if near else None
    column = column.cast(pl.Float64) if kind.is_decimal() else column
    exact = [*map(float, values.whole), *(n for n in values.numbers if math.isinf(n))]
    if exact:
        found.append(column.is_in(pl.Series(exact, dtype=column.dtype)))
    if fractions := [n for n in values.numbers if not math.isinf(n)]:
        # It may have been a float32 before, see `number_of`.
        found.append(column.cast(pl.Float32).is_in(pl.Series(fractions, dtype=pl.Float32)))
    return reduce(operator.or_, found) if found else None


def stripped(column: str, kind: pl.DataType) -> pl.Expr:
    """Text without surrounding blanks, as the csv parser reads numbers; null if nothing is left."""
    if kind != pl.String:
        return pl.col(column)
    text = pl.col(column).str.strip_chars()
    return pl.when(text != "").then(text)


def number_of(column: str, kind: pl.DataType) -> pl.Expr:
    """A column as Float64, null where it is no number, rounded to the nearest float32.

    So 9.99 is the same number as text, as a float of any width and as a decimal.
    """
    value = stripped(column, kind).cast(pl.Float64, strict=False)
    return value.cast(pl.Float32).cast(pl.Float64)


class Typed(NamedTuple):
    """An input made of a column.

    Attributes:
        values: null where a value is bad; in lists, bad ids are left out.
        is_bad: whether a cell has a bad value; null counts as good. None: no cell can.
        remedy: what to write, or a function of the bad value and of that in the column `beside`.
    """

    column: str
    values: pl.Expr
    is_bad: pl.Expr | None = None
    remedy: str | Callable[..., str] = ""
    beside: str | None = None

    def remedy_of(self, value: Any, beside: Any = None) -> str:
        """What to write instead of a bad value; `beside` is that in the other column."""
        if isinstance(self.remedy, str):
            return self.remedy
        return self.remedy(value, *[beside] * (self.beside is not None))


def typed_number(column: str, kind: pl.DataType) -> Typed:
    """A number, see `number_of`; null also where the cell is empty."""
    value = number_of(column, kind)
    bad = _is_bad(column, kind, value.abs() <= LARGEST)
    return Typed(column, pl.when(~bad).then(value), bad, remedy_of_number)


def remedy_of_number(value: Any) -> str:
    """What to write instead of a bad number."""
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d[\d.' ]*,\d+\s*", value):
        point = re.sub(r"[.' ]", "", value).strip().replace(",", ".")
        # A comma may stand between thousands, too.
        other = f" or {value.strip().replace(',', '')}" * bool(
            re.search(r"^\D*\d+,\d{3}\s*$", value)
        )
        return f"write {point}{other}, with a point before the fraction, nothing between thousands"
    return f"write a finite number up to {LARGEST:.1e}, or leave the cell empty"


def _is_bad(column: str, kind: pl.DataType, is_good: pl.Expr) -> pl.Expr:
    """Whether a cell has a value, and a bad one."""
    return stripped(column, kind).is_not_null() & ~is_good.fill_null(False)


def filled(value: pl.Expr, fill: float, transform: Sequence[str]) -> pl.Expr:
    """A number with missing values filled; with `log1p`, `ln(1 + max(x, 0))` of it."""
    value = value.fill_null(fill)
    return value.clip(lower_bound=0.0).log1p() if "log1p" in transform else value


def scaled(
    value: pl.Expr,
    transform: Sequence[str],
    low: float,
    high: float,
    mean: float,
    deviation: float,
) -> pl.Expr:
    """The network's input of a `filled` number, Float32; `minmax` and `standard` use the rest.

    `low`, `high`, `mean` and `deviation` are statistics of the filled numbers of the training part.
    """
    if "minmax" in transform:
        width = high - low
        value = ((value - low) / (width if width > 0 else 1.0)).clip(0.0, 1.0)
    elif "standard" in transform:
        value = (value - mean) / (deviation if deviation > 0 else 1.0)
    return value.cast(pl.Float32)


def bucket_rows(numbers: pl.Series, edges: Sequence[float]) -> np.ndarray:
    """Row of the bucket of each number: `[n]` int64, 0 for missing numbers."""
    values = numbers.to_numpy()
    rows = np.searchsorted(np.array(edges), values, side="left") + _FIRST_BUCKET
    if numbers.null_count():
        rows[numbers.is_null().to_numpy()] = 0
    return rows


def seconds_of_time(column: str, kind: pl.DataType, format: str) -> pl.Expr:
    """A column of times as seconds since 1970, UTC: Int64, null where bad.

    Times outside 1990 to 2099 are bad, as those of another format.

    Args:
        format: one of `UNITS`, `iso8601`, or a format of strptime; dates and datetimes need none.
    """
    if kind.is_temporal():
        found = pl.col(column).dt.epoch("s")
    elif format in UNITS:
        given = stripped(column, kind)
        found = given.cast(pl.Int64, strict=False)
        if kind.is_decimal():
            found = given.cast(pl.Float64).floor().cast(pl.Int64, strict=False)
        if kind == pl.String:
            # Pandas writes 1772668806.0 beside a missing one.
            fraction = given.cast(pl.Float64, strict=False).floor()
            found = pl.coalesce(found, fraction.cast(pl.Int64, strict=False))
        found = found // UNITS[format]
    elif format == "iso8601":
        found = _seconds_of_iso8601(pl.col(column).cast(pl.String).str.strip_chars())
    else:
        text = pl.col(column).cast(pl.String)
        # The parser needs minutes with hours; Avazu has hours alone.
        if "%H" in format and "%M" not in format:
            text, format = text + ":00", format + ":%M"
        found = text.str.strptime(pl.Datetime("us"), format, strict=False).dt.epoch("s")
    is_time = found.is_between(FIRST_TIME, LAST_TIME)
    if format == "seconds" and not kind.is_temporal():
        # 2026030112 is noon in March 2026; as seconds it would be in 2034.
        month, day, hour = found // 10_000 % 100, found // 100 % 100, found % 100
        is_date = found.is_between(1_990_010_100, 2_099_123_123) & month.is_between(1, 12)
        is_time &= ~(is_date & day.is_between(1, 31) & (hour <= 23))
    return pl.when(is_time).then(found)


def typed_time(column: str, kind: pl.DataType, format: str) -> Typed:
    """A time, see `seconds_of_time`; an empty cell is bad."""
    seconds = seconds_of_time(column, kind, format)
    remedy = partial(remedy_of_time, column=column, format="" if kind.is_temporal() else format)
    return Typed(column, seconds, seconds.is_null(), remedy)


# Date, time of day, seconds, and hours and minutes east of Greenwich; UTC without the latter.
_ISO8601 = (
    r"^(\d{4}-\d\d-\d\d)(?:[Tt ](\d\d:\d\d)(?::(\d\d)(?:[.,]\d+)?)?"
    r"\s*(?:[Zz]|UTC|([+-]\d\d)(?::?(\d\d))?)?)?$"
)


def _seconds_of_iso8601(text: pl.Expr) -> pl.Expr:
    date, clock, seconds, hours, minutes = (text.str.extract(_ISO8601, i) for i in range(1, 6))
    clock = clock.fill_null("00:00") + ":" + seconds.fill_null("00")
    when = (date + " " + clock).str.strptime(pl.Datetime("us"), "%Y-%m-%d %H:%M:%S", strict=False)
    east = hours.fill_null("+0").str.slice(1).cast(pl.Int64, strict=False) * HOUR
    east += minutes.fill_null("0").cast(pl.Int64, strict=False) * 60
    return when.dt.epoch("s") - pl.when(hours.str.starts_with("-")).then(-east).otherwise(east)


def fitting_format(times: pl.Series) -> str | None:
    """The first of `FORMATS` in which all values are times; None if there is no value or format."""
    times, kind = times.drop_nulls(), times.dtype
    for format in FORMATS if len(times) else ():
        if not (kind.is_numeric() or kind == pl.String) or ("-" in format and kind != pl.String):
            continue
        # Floats are no dates.
        if format in UNITS or kind == pl.String or kind.is_integer():
            found = seconds_of_time(times.name, kind, format)
            if not times.to_frame().select(found.is_null().any()).item():
                return format
    return None


def remedy_of_time(value: Any, column: str, format: str) -> str:
    """What to write instead of a bad time; `format` is empty for dates and datetimes."""
    remedy = "write a time in 1990 to 2099" + f" as {format}" * bool(format)
    if format in UNITS:
        remedy = f"write whole {format} since 1970, of a time in 1990 to 2099"
    other = fitting_format(pl.Series(column, [value]))
    if format and other not in (None, format):
        section = f"`time: {{column: {column}, format: {other!r}}}`"
        remedy += f", or train with {section} in the schema, which fits it"
    return remedy


def part_of_time(seconds: pl.Expr, part: str) -> pl.Expr:
    """`hour_of_day` (0 to 23) or `weekday` (Monday is 0) of seconds since 1970."""
    if part == "hour_of_day":
        return seconds.mod(DAY) // HOUR
    return ((seconds // DAY) + THURSDAY).mod(WEEK)


def written_alike(ids: pl.Series) -> tuple[pl.Series, int]:
    """Ids, or lists of them, as text that does not depend on their type.

    A whole number has no fraction: 45 for the float 45.0, the decimal 45.00 and the text `45.0`,
    which pandas writes for whole numbers with missing values. Other numbers are the shortest text
    that gives their value, such as 45.5. `BOOLEANS` and typed booleans are true and false.

    Returns:
        The ids, and the number of single texts that became whole numbers.
    """
    kind = ids.dtype
    if isinstance(kind, pl.List | pl.Array):
        ids = ids.arr.to_list() if isinstance(kind, pl.Array) else ids
        return ids.list.eval(_written_alike(pl.element(), kind.inner)), 0
    changed = 0
    if kind == pl.String:
        # Few ids end in 0; this is much faster than to match all of them.
        ends = ids.filter(ids.str.ends_with("0").fill_null(False))
        changed = int(ends.str.contains(_WHOLE).sum())
        if not changed and not ids.is_in(list(BOOLEANS)).any():
            return ids, 0
    value = _written_alike(pl.col(ids.name), kind)
    return ids.to_frame().select(value).to_series(), changed


def _written_alike(value: pl.Expr, kind: pl.DataType) -> pl.Expr:
    text = value.cast(pl.String)
    if kind == pl.String:
        return text.str.replace(_WHOLE, "${1}").replace(BOOLEANS)
    if kind.is_float():
        is_whole = (value % 1 == 0) & (value.abs() < 2**63)
        whole = value.cast(pl.Int64, strict=False).cast(pl.String)
        return pl.when(is_whole).then(whole).otherwise(text)
    if kind.is_decimal():
        has_fraction = text.str.contains(".", literal=True)
        return pl.when(has_fraction).then(text.str.replace(r"\.?0+$", "")).otherwise(text)
    return text


def text_of(value: Any) -> str | None:
    """A value of Python as the text of a CSV file, whole numbers without a fraction.

    None if it is no text, number or boolean.
    """
    if isinstance(value, decimal.Decimal):
        text = f"{value:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    is_known = isinstance(value, str | bool | np.bool_ | int | np.integer | float | np.floating)
    return str(value) if is_known else None


def too_coarse(ids: pl.Series) -> pl.Series:
    """Whether a float is a whole number that may stand for several ids, as digits were lost."""
    most = LARGEST_WHOLE.get(ids.dtype)
    if most is None:
        return pl.Series([False]).new_from_index(0, len(ids))
    return (ids.is_not_nan() & (ids.abs() > most)).fill_null(False)


# A value of a JSON list: a text whose escapes are whole characters, a number, or a word.
_JSON_TEXT = (
    r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}|'
    r'[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*"'
)
_JSON_VALUE = rf"(?:{_JSON_TEXT}|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)"
_JSON_LIST = rf"^\s*\[\s*(?:{_JSON_VALUE}\s*(?:,\s*{_JSON_VALUE}\s*)*)?\]\s*$"

_JSON_PAIR = rf"{_JSON_TEXT}\s*:\s*{_JSON_VALUE}"
_JSON_OBJECT = rf"^\s*\{{\s*(?:{_JSON_PAIR}\s*(?:,\s*{_JSON_PAIR}\s*)*)?\}}\s*$"

# A separator that stands for JSON lists, and what to write instead of a cell that is none.
JSON = "json"
REMEDY_OF_JSON = 'write a JSON list of texts or numbers, such as ["a", "b"]'
_REMEDY_OF_OBJECT = 'write a JSON object of texts or numbers, such as {"a": 0.5, "b": 2}'
_PARTS = ("key", "value")


def parts_of_objects(columns: Iterable[str]) -> dict[str, str]:
    """The column of each `COLUMN.key` and `COLUMN.value`."""
    return {f"{column}.{part}": column for column in columns for part in _PARTS}


def part_of_objects(column: str, name: str) -> pl.Expr:
    """The keys or values of JSON objects as texts of JSON lists; other cells as no list."""
    cells, pair = pl.col(column), pl.element()
    start = rf"^{_JSON_TEXT}\s*:\s*"
    is_key = name.endswith(".key")
    part = pair.str.extract(rf"^({_JSON_TEXT})") if is_key else pair.str.replace(start, "")
    parts = cells.str.extract_all(_JSON_PAIR).list.eval(part).list.join(", ")
    found = pl.format("[{}]", parts)
    is_list = cells.str.contains(_JSON_LIST)
    other = pl.when(is_list).then(pl.format("{} (a list)", cells)).otherwise(cells)
    return pl.when(cells.str.contains(_JSON_OBJECT)).then(found).otherwise(other).alias(name)


def hold_objects(cells: pl.Series) -> bool:
    """Whether all cells but the missing ones are JSON objects of texts, numbers and words."""
    if cells.dtype != pl.String or cells.null_count() == len(cells):
        return False
    return bool(cells.drop_nulls().str.contains(_JSON_OBJECT).all())


def split(cells: pl.Expr, separator: str) -> pl.Expr:
    """Lists of the texts in cells; null for a cell that is no list with the separator `json`."""
    if separator != JSON:
        return cells.str.split(separator)
    # Polars' own decoder raises at the first cell that is no JSON.
    items = pl.when(cells.str.contains(_JSON_LIST)).then(cells).str.extract_all(_JSON_VALUE)
    item = pl.element()
    is_text = item.str.starts_with('"')
    text = pl.when(is_text).then(item).otherwise(pl.lit('""')).str.json_decode(pl.String)
    # A number is its value, as in a list of a Parquet file: 100 for 1e2.
    is_float = ~is_text & item.str.contains(r"[.eE]\d|^-0$|[eE][+-]")
    number = pl.when(is_float).then(item).cast(pl.Float64)
    number = _written_alike(number, pl.Float64())
    known = pl.when(is_text).then(text).when(is_float).then(number)
    return items.list.eval(known.when(item != "null").then(item))


class Ids(NamedTuple):
    """How a field's ids stand in a column, after `written_alike`.

    Attributes:
        separator: between the ids of a cell; None: one id.
        max_ids, keep: how many ids of a cell are kept, and whether the `first` or the `last`.
        missing: texts to leave out of lists; single cells with such a text are already null.
        size: ids are whole numbers from 0 to `size - 1`; None: any texts.
        size_key: where the user writes that size.
    """

    column: str
    separator: str | None
    missing: Sequence[str]
    max_ids: int | None = None
    keep: str = "first"
    size: int | None = None
    size_key: str = ""


def typed_ids(ids: Ids, kind: pl.DataType) -> Typed:
    """Ids as text, or Int64 if they have a size; lists of them for multi-valued fields."""
    cells = _id_texts(ids, kind)
    no_list = None
    if ids.separator == JSON and kind == pl.String:
        no_list = _is_bad(ids.column, kind, cells.is_not_null())
    if ids.size is None:
        is_part = ids.column.rpartition(".")[2] in _PARTS
        return Typed(ids.column, cells, no_list, _REMEDY_OF_OBJECT if is_part else REMEDY_OF_JSON)
    remedy = f"write whole numbers from 0 to {ids.size - 1}{ids.size_key}"
    if ids.separator is None:
        number = _whole(cells)
        bad = _is_bad(ids.column, kind, _is_row(number, ids.size))
        return Typed(ids.column, pl.when(~bad).then(number), bad, remedy)
    numbers, is_good = cells.list.eval(_whole(pl.element())), _is_row(pl.element(), ids.size)
    bad = numbers.list.eval(~is_good).list.any().fill_null(False)
    if no_list is not None:
        bad, remedy = bad | no_list, f"{remedy}, as a JSON list"
    return Typed(ids.column, numbers.list.eval(pl.element().filter(is_good)), bad, remedy)


def _whole(text: pl.Expr) -> pl.Expr:
    return text.str.strip_chars().cast(pl.Int64, strict=False)


def _is_row(number: pl.Expr, size: int) -> pl.Expr:
    return number.is_between(0, size - 1).fill_null(False)


def _id_texts(ids: Ids, kind: pl.DataType) -> pl.Expr:
    """Ids, or lists of those that are kept, as text."""
    if ids.separator is None:
        return pl.col(ids.column).cast(pl.String)
    texts = _written_alike(pl.element(), pl.String())
    kept = texts.filter(~texts.is_in(texts_of_marks(["", *ids.missing])))
    return _kept(_listed(ids.column, kind, ids.separator).list.eval(kept), ids)


def _kept(cells: pl.Expr, ids: Ids) -> pl.Expr:
    if ids.max_ids is None:
        return cells
    return cells.list.tail(ids.max_ids) if ids.keep == "last" else cells.list.head(ids.max_ids)


def typed_weights(column: str, kind: pl.DataType, ids: Ids, kind_of_ids: pl.DataType) -> Typed:
    """The weights of the ids that `typed_ids` keeps, lists of Float64.

    A cell is bad if it has another number of weights than ids, or a weight that is no finite
    float32.

    Args:
        column: of the weights, lists or texts with the separator of the ids.
    """
    texts = _listed(ids.column, kind_of_ids, ids.separator)
    number = pl.element().str.strip_chars().cast(pl.Float64, strict=False)
    numbers = _listed(column, kind, ids.separator).list.eval(number)
    alike = _written_alike(pl.element(), pl.String())
    is_text = ~alike.is_in(texts_of_marks(["", *ids.missing])).fill_null(True)
    places = _kept(texts.list.eval(pl.arg_where(is_text)), ids)
    kept = numbers.list.gather(places, null_on_oob=True)
    if ids.size is not None:
        places = pl.arg_where(_is_row(_whole(pl.element()), ids.size))
        kept = kept.list.gather(_id_texts(ids, kind_of_ids).list.eval(places), null_on_oob=True)
    is_good = (pl.element().abs() <= LARGEST).fill_null(False)
    counts = (each.list.len().fill_null(0) for each in (numbers, texts))
    bad = operator.ne(*counts) | kept.list.eval(~is_good).list.any().fill_null(False)
    remedy = partial(remedy_of_weights, separator=ids.separator, column=ids.column)
    return Typed(column, pl.when(~bad).then(kept), bad, remedy, beside=ids.column)


def remedy_of_weights(weights: Any, ids: Any, separator: str, column: str) -> str:
    """What to write instead of bad weights of a cell's ids; `column` is that of the ids."""

    def count(cell: Any) -> int | None:
        """None of a text that is no list."""
        if not isinstance(cell, str):
            return 0 if cell is None else len(cell)
        found = pl.DataFrame({"cell": [cell]}).select(split(pl.col("cell"), separator)).item()
        return None if found is None else found.len()

    of_weights, of_ids = count(weights), count(ids) or 0
    if of_weights is None:
        return "write a JSON list of numbers, such as [0.5, 2]"
    if of_weights != of_ids:
        return (
            f"there are {of_weights} weights for {of_ids} ids in column {column}; write one for "
            "each id"
        )
    return "write finite numbers"


def flattened_weights(weights: pl.Series, lengths: np.ndarray) -> np.ndarray:
    """Weight of each id of multi-valued cells of `lengths`, float32; 1 where a cell has none."""
    found = np.ones(int(lengths.sum()), np.float32)
    has = weights.list.len().fill_null(0).to_numpy() > 0
    found[np.repeat(has, lengths)] = weights.filter(pl.Series(has)).explode().to_numpy()
    return found


def _listed(column: str, kind: pl.DataType, separator: str) -> pl.Expr:
    """Cells of a multi-valued column as lists of texts."""
    cells = pl.col(column)
    if isinstance(kind, pl.Array):
        cells = cells.arr.to_list()
    if isinstance(kind, pl.List | pl.Array):
        return cells.cast(pl.List(pl.String))
    return split(cells.cast(pl.String), separator)


def flattened(cells: pl.Series, fills: bool = True) -> tuple[np.ndarray, pl.Series]:
    """Number of ids of each multi-valued cell, `[n]` int64, and all ids.

    Args:
        fills: whether a cell without ids gets one id, null.
    """
    lengths = cells.list.len().fill_null(0).to_numpy().astype(np.int64)
    if not fills:
        return lengths, cells.filter(lengths > 0).explode()
    # Explode turns an empty list, and a null, into one null.
    return np.maximum(lengths, 1), cells.explode()


def bucket(ids: pl.Series, buckets: int, seed: int) -> np.ndarray:
    """A bucket for each text, 0 to `buckets - 1`: `[n]` int64; for null, any of them.

    The hash is the same in every version and on every machine: FNV-1a over the UTF-8 bytes, with a
    start that depends on the seed, then the finalizer of splitmix64, as the low bits of FNV alone
    depend on the last characters only.
    """
    # Polars' own hash may change with its version, which would change the rows of trained tables.
    ids = ids.fill_null("")
    distinct = ids.unique()
    position = ids.replace_strict(
        distinct, pl.int_range(len(distinct), eager=True), return_dtype=pl.Int64
    )
    hashes = stable_hashes(distinct, seed)
    return (hashes % np.uint64(buckets)).astype(np.int64)[position.to_numpy().astype(np.int64)]


def stable_hashes(texts: pl.Series, seed: int = 0) -> np.ndarray:
    """A hash of each text that is the same in every version: `[n]` uint64, see `bucket`."""
    data = np.frombuffer("".join(texts.to_list()).encode(), dtype=np.uint8)
    lengths = texts.str.len_bytes().to_numpy().astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    start = _splitmix(np.array([seed], dtype=np.uint64)) ^ _FNV_OFFSET
    hashes = np.full(len(texts), start[0], dtype=np.uint64)
    # Longest first, so that the texts with a byte at a place come first.
    order = np.argsort(-lengths, kind="stable")
    starts, sorted_lengths = starts[order], lengths[order]
    for place in range(int(sorted_lengths[0]) if len(order) else 0):
        longer = np.searchsorted(-sorted_lengths, -place, side="left")
        hashes[:longer] = (hashes[:longer] ^ data[starts[:longer] + place]) * _FNV_PRIME
    found = np.empty_like(hashes)
    found[order] = hashes
    return _splitmix(found)


def _splitmix(hashes: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))
