"""Values within a column of a Parquet file: `orders.item` of structs, lists of structs and maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import polars as pl
import pyarrow
import pyarrow.types


def names_within(schema: pyarrow.Schema) -> dict[str, str]:
    """The column of each `COLUMN.NAME`; a map has `key` and `value`.

    A column of that very name comes first.
    """
    found = {name: column.name for column in schema for name in _names(column.name, column.type)}
    return {name: column for name, column in found.items() if name not in schema.names}


def leaves(schema: pyarrow.Schema) -> list[str]:
    """The names of columns, and of what is within them, that hold nothing further."""
    every = [*schema.names, *names_within(schema)]
    return [n for n in every if not any(other.startswith(f"{n}.") for other in every)]


def unnested(frame: pl.DataFrame, used: Iterable[str]) -> pl.DataFrame:
    """A frame of the used names, which are columns or values within them."""
    within = values_within(frame.schema)
    return frame.select(within[name].alias(name) if name in within else name for name in used)


def values_within(types: Mapping[str, pl.DataType]) -> dict[str, pl.Expr]:
    """The values of each `COLUMN.NAME`; of a list of structs, a list for each cell."""
    found = {}
    for column, kind in types.items():
        found |= dict(_values(column, kind, pl.col(column)))
    return {name: values for name, values in found.items() if name not in types}


def holds(column: str, used: Iterable[str]) -> bool:
    """Whether a column is used, or may have used values within it."""
    return any(name == column or name.startswith(f"{column}.") for name in used)


def _names(column: str, kind: pyarrow.DataType) -> Iterator[str]:
    of = pyarrow.types
    if of.is_map(kind):
        yield from (f"{column}.key", f"{column}.value")
    elif of.is_struct(kind):
        for field in kind:
            yield f"{column}.{field.name}"
            yield from _names(f"{column}.{field.name}", field.type)
    elif (
        of.is_list(kind) or of.is_large_list(kind) or of.is_fixed_size_list(kind)
    ) and of.is_struct(kind.value_type):
        yield from (f"{column}.{field.name}" for field in kind.value_type)


def _values(column: str, kind: pl.DataType, values: pl.Expr) -> Iterator[tuple[str, pl.Expr]]:
    if isinstance(kind, pl.Struct):
        for field in kind.fields:
            name, inner = f"{column}.{field.name}", values.struct.field(field.name)
            yield name, inner
            yield from _values(name, field.dtype, inner)
    elif isinstance(kind, pl.List | pl.Array) and isinstance(kind.inner, pl.Struct):
        cells = values.arr.to_list() if isinstance(kind, pl.Array) else values
        for field in kind.inner.fields:
            element = pl.element().struct.field(field.name)
            yield f"{column}.{field.name}", cells.list.eval(element)
