"""Values within a column of a Parquet file: `orders.item` of structs, lists of structs and maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import polars as pl


class Nested(NamedTuple):
    """The values of one name within a column.

    Attributes:
        column: of the file.
        values: of all its cells; of a list of structs, a list for each cell.
    """

    column: str
    values: pl.Expr


def nested(types: Mapping[str, pl.DataType]) -> dict[str, Nested]:
    """What structs, lists of structs and maps hold, by `COLUMN.NAME`; a map has `key` and `value`.

    A column of that very name comes first.
    """
    found = {}
    for column, kind in types.items():
        found |= {name: Nested(column, values) for name, values in _within(column, kind)}
    return {name: one for name, one in found.items() if name not in types}


def leaves(types: Mapping[str, pl.DataType]) -> list[str]:
    """The names of columns, and of what is within them, that hold nothing further."""
    every = [*types, *nested(types)]
    return [n for n in every if not any(other.startswith(f"{n}.") for other in every)]


def columns_with(used: Iterable[str], types: Mapping[str, pl.DataType]) -> set[str]:
    """The columns of a file that hold the used names."""
    within = nested(types)
    return {within[name].column if name in within else name for name in used}


def unnested(frame: pl.DataFrame, used: Iterable[str]) -> pl.DataFrame:
    """A frame of the used names, which are columns or values within them."""
    within = nested(frame.schema)
    return frame.select(within[n].values.alias(n) if n in within else n for n in sorted(used))


def _within(
    column: str, kind: pl.DataType, values: pl.Expr | None = None
) -> Iterator[tuple[str, pl.Expr]]:
    values = pl.col(column) if values is None else values
    if isinstance(kind, pl.Struct):
        for field in kind.fields:
            name, inner = f"{column}.{field.name}", values.struct.field(field.name)
            yield name, inner
            yield from _within(name, field.dtype, inner)
    elif isinstance(kind, pl.List) and isinstance(kind.inner, pl.Struct):
        for field in kind.inner.fields:
            element = pl.element().struct.field(field.name)
            yield f"{column}.{field.name}", values.list.eval(element)
