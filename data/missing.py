"""What counts as a missing value.

Cells with a text of the schema's `missing` become null while a log is read; a null id gets the
row `missing_row` of its table (see `data/learning/learned.py`), a null number the schema's `fill`
(see `filled` of `data/formulas.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

import polars as pl

from stampede.data.formulas import (
    marked,
    split,
    texts_of_marks,
    values_of_marks,
    written_alike,
)
from stampede.data.raw.rows import Marks
from stampede.data.schema.schema import Schema
from stampede.settings import counted


def without_marks(
    frame: pl.DataFrame,
    missing: Sequence[str],
    labels: Set[str] = frozenset(),
    numeric: Set[str] = frozenset(),
) -> tuple[pl.DataFrame, Marks]:
    """Replace cells that mean a missing value, see `marked`, by null, and count them.

    Empty cells are not counted.

    Args:
        labels: columns of labels and weights, in which numbers and booleans are always values.
        numeric: columns of numbers, perhaps as texts.
    """
    words = [mark for mark in missing if not any(values_of_marks([mark]))]
    counted: Marks = Counter()
    changed = []
    for column in frame:
        marks = words if column.name in labels else missing
        is_mark = marked(column, marks, column.name in numeric)
        if is_mark is not None:
            marks = column.filter(is_mark.fill_null(False)).cast(pl.String)
            counted += counts_of_marks(marks)
            changed.append(pl.when(~is_mark).then(pl.col(column.name)).alias(column.name))
    return frame.with_columns(changed), counted


def counts_of_marks(marks: pl.Series) -> Marks:
    """Number of occurrences of each text in a column, without empty ones."""
    found = marks.value_counts(name="cells")
    return Counter({(marks.name, mark): cells for mark, cells in found.iter_rows() if mark})


def marks_in_bags(frame: pl.DataFrame, schema: Schema) -> Marks:
    """Ids of multi-valued cells that are missing because of their text."""
    marks, found = [mark for mark in schema.missing if mark], Counter()
    texts = texts_of_marks(marks)
    for name, field in schema.ids.items():
        if field.separator is None or not marks:
            continue
        cells = frame[field.column or name]
        if cells.dtype == pl.String:
            cells = cells.filter(cells.str.contains_any(texts).fill_null(False))
            split_cells = split(pl.col(cells.name), field.separator)
            cells = cells.to_frame().select(split_cells).to_series()
        if isinstance(cells.dtype, pl.List | pl.Array):
            ids = written_alike(cells.explode())[0].cast(pl.String)
            found |= counts_of_marks(ids.filter(ids.is_in(texts).fill_null(False)))
    return found


def missing_marks_sentence(columns: dict[str, dict[str, int]]) -> str:
    """A sentence on cells, by column and text, that were missing because of it; may be empty."""
    if not columns:
        return ""
    named = []
    for column, marks in list(columns.items())[:8]:
        shown = ", ".join(f"{mark!r} {times:,}" for mark, times in list(marks.items())[:4])
        named.append(f"{column} ({shown})")
    more = f" and {len(columns) - 8} more columns" * (len(columns) > 8)
    cells = sum(sum(marks.values()) for marks in columns.values())
    return (
        f"treated {counted(cells, 'cell')} as missing because of the text: "
        f"{', '.join(named)}{more}; if such a text is a value, write the schema's list `missing` "
        "without it"
    )
