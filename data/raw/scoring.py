"""A log whose rows are to be scored: label and weight need not be there."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from stampede.data.raw.log import RawLog, format_of
from stampede.data.schema import Schema
from stampede.data.schema.columns import TimePart


def scoring_log(
    schema: Schema,
    files: Sequence[Path],
    with_label: bool = True,
    bad_values_are_missing: bool = False,
) -> RawLog:
    """Files with the columns of a schema, of which those may be absent that no input is made of.

    Args:
        schema: as the model was trained with.
        files: in order; the first tells what is there.
        with_label: whether label and weight are read where they are there.
        bad_values_are_missing: see `RawLog`.

    Returns:
        The log; its schema says what is read.

    Raises:
        DataError: the first file cannot be read.
    """
    label = schema.label.column
    columns = format_of(schema, files[0]).names(files[0], label)
    meaning = _read(schema, columns, with_label)
    return RawLog(meaning, files, bad_values_are_missing=bad_values_are_missing)


def _read(schema: Schema, columns: Sequence[str], with_label: bool) -> Schema:
    wanted: Set[str] = set(columns) if with_label else set()
    is_timed = any(isinstance(field, TimePart) for field in schema.ids.values())
    return schema.model_copy(
        update={
            "columns": list(columns) if schema.columns else [],
            "label": schema.label if schema.label.column in wanted else None,
            "weight": schema.weight if schema.weight in wanted else None,
            # A time that no input is made of only divides a log into parts.
            "time": schema.time if is_timed else None,
        }
    )
