"""Texts such as `NA` that stand for a missing value: found, made null, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

# Cells that became null, by column and mark.
Marks = Counter[tuple[str, str]]

_MOST_COLUMNS, _MOST_MARKS = 8, 4


def any_mark(text: bytes, missing: Sequence[str], separator: str, quote: str) -> bool:
    """Whether a mark fills a cell of these lines.

    Most logs have none; this costs far less than to compare every cell.
    """
    array = np.frombuffer(text, dtype=np.uint8)
    is_edge = np.zeros(256, dtype=bool)
    is_edge[list(b"\r\n" + separator.encode() + quote.encode())] = True
    marks = [mark.encode() for mark in missing if mark]
    for first in {mark[:1] for mark in marks}:
        if first not in text:
            continue
        starts = np.flatnonzero(array == ord(first))
        starts = starts[(starts == 0) | is_edge[array[starts - 1]]]
        for mark in marks:
            if mark.startswith(first) and _fills(array, starts, mark, is_edge):
                return True
    return False


def _fills(array: np.ndarray, starts: np.ndarray, mark: bytes, is_edge: np.ndarray) -> bool:
    """Whether a mark begins at one of `starts` and ends at the end of a cell."""
    starts = starts[starts + len(mark) < len(array)]
    for place in range(1, len(mark)):
        starts = starts[array[starts + place] == mark[place]]
    return bool(is_edge[array[starts + len(mark)]].any())


def without_marks(frame: pl.DataFrame, missing: Sequence[str]) -> tuple[pl.DataFrame, Marks]:
    """The rows with null where a cell holds a mark, and how many there are.

    A float that is not a number is missing where `NaN` is a mark. An empty text becomes null if
    it is among the marks, but is not counted: everybody writes missing values so.
    """
    counted: Marks = Counter()
    changed = []
    for column in frame:
        if column.dtype == pl.String:
            is_mark = column.is_in(list(missing))
        elif column.dtype.is_float() and any(mark.lower() == "nan" for mark in missing):
            is_mark = column.is_nan()
        else:
            continue
        if not is_mark.any():
            continue
        found = column.filter(is_mark.fill_null(False)).cast(pl.String).value_counts(name="cells")
        counted.update({(column.name, mark): cells for mark, cells in found.iter_rows() if mark})
        changed.append(pl.when(~is_mark).then(pl.col(column.name)).alias(column.name))
    return (frame.with_columns(changed) if changed else frame), counted


def by_column(marks: Marks) -> dict[str, dict[str, int]]:
    """Cells by mark, by column; the most frequent first."""
    columns: dict[str, dict[str, int]] = {}
    for (column, mark), cells in marks.most_common():
        columns.setdefault(column, {})[mark] = cells
    return columns


def sentence(columns: Mapping[str, Mapping[str, int]]) -> str:
    """For a person, of what `by_column` gives; empty where nothing was found."""
    if not columns:
        return ""
    told = []
    for column, marks in list(columns.items())[:_MOST_COLUMNS]:
        shown = ", ".join(
            f"{mark!r} {cells:,}" for mark, cells in list(marks.items())[:_MOST_MARKS]
        )
        told.append(f"{column} ({shown})")
    more = f" and {len(columns) - _MOST_COLUMNS} more columns" * (len(columns) > _MOST_COLUMNS)
    cells = sum(sum(marks.values()) for marks in columns.values())
    return (
        f"{cells:,} cells count as missing because of their text: {', '.join(told)}{more}; to keep "
        "such texts as ids, list only the others as `missing` in the schema"
    )
