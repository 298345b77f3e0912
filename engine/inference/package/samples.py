"""Raw samples, in whatever form, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import polars as pl

# Columns by name, samples one after the other, or a table: of polars, or of pandas.
Samples = Mapping[str, Sequence[Any]] | Iterable[Mapping[str, Any]] | pl.DataFrame | Any

NO_ID = "write an id as text or as a whole number, None where it is missing"


def table_of(
    samples: Samples, columns: list[str], id_columns: Set[str], bad_values: Any
) -> pl.DataFrame:
    """The wanted columns.

    Args:
        samples: raw ones.
        columns: that are wanted.
        id_columns: of these, the columns whose values are taken for text.
        bad_values: what happens to bad ones (see `encode.BadValues`).

    Raises:
        ValueError: a column is absent, or a value is neither text nor number nor list.
    """
    if type(samples).__module__.partition(".")[0] == "pandas":
        samples = _of_pandas(samples, columns)
    if isinstance(samples, pl.DataFrame | Mapping):
        given = list(samples.columns if isinstance(samples, pl.DataFrame) else samples)
    else:
        samples = list(samples)
        if other := [sample for sample in samples if not isinstance(sample, Mapping)]:
            raise ValueError(
                f"found the sample {other[0]!r}; write a sample as values by column, or all "
                "samples as columns by name or as a table of polars or pandas"
            )
        given = [name for name in columns if all(name in sample for sample in samples)]
        samples = {name: [sample[name] for sample in samples] for name in given}
    absent = [name for name in columns if name not in given]
    if absent:
        raise ValueError(f"no column {absent[0]!r}; the model needs {', '.join(columns)}")
    series = [_series(name, samples[name], name in id_columns, bad_values) for name in columns]
    if len({len(column) for column in series}) > 1:
        sizes = ", ".join(f"{column.name} {len(column)}" for column in series)
        raise ValueError(f"columns of different lengths: {sizes}")
    return pl.DataFrame(series)


def _of_pandas(table: Any, columns: list[str]) -> dict[str, list[Any]]:
    """The wanted columns of a pandas table that are there; None where a value is missing."""
    return {
        name: table[name].astype(object).where(table[name].notna(), None).tolist()
        for name in columns
        if name in table.columns
    }


def _series(name: str, values: Any, is_id: bool, bad_values: Any) -> pl.Series:
    if isinstance(values, str):
        raise ValueError(f"column {name}: found {values!r}; write a list, of a value per sample")
    if isinstance(values, list | tuple):
        values = _alike(name, values, is_id, bad_values)
    try:
        found = pl.Series(name, values, strict=False)
    except (TypeError, pl.exceptions.PolarsError) as failure:
        raise ValueError(f"column {name}: {failure}; write text, numbers or lists") from None
    if found.dtype == pl.Object:
        raise ValueError(f"column {name}: found {found[0]!r}; write text, numbers or lists")
    return found


def _alike(name: str, values: Sequence[Any], is_id: bool, bad_values: Any) -> Sequence[Any]:
    """Values that polars does not make a common text of which nobody wrote."""
    kinds = set(map(type, values)) - {type(None)}
    lists = {kind for kind in kinds if issubclass(kind, list | tuple | np.ndarray | pl.Series)}
    if lists and kinds - lists:
        raise ValueError(
            f"column {name}: found lists beside single values; write lists in all samples, or in "
            "none"
        )
    if np.ndarray in lists:
        return [None if value is None else list(value) for value in values]
    if is_id and str in kinds and any(issubclass(kind, float | np.floating) for kind in kinds):
        floats = [value for value in values if isinstance(value, float | np.floating)]
        fractions = pl.Series(name, [value for value in floats if not value.is_integer()])
        bad_values.found(fractions.is_not_null(), fractions, name, NO_ID)
        return [_whole(value) for value in values]
    return values


def _whole(value: Any) -> Any:
    """An id that is a float as a whole number; None where it is none."""
    if not isinstance(value, float | np.floating):
        return value
    return int(value) if value.is_integer() else None
