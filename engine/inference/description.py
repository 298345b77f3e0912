"""What the inputs of a model are made of, for the loader of an exported package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stampede.data.learning.learned import Saved
from stampede.data.learning.vocabulary import FIRST_ROW
from stampede.data.prepared.manifest import FieldEntry, Manifest
from stampede.data.schema.schema import Hashed, IdField, Integers, Quantiles, TimePart, Vocabulary
from stampede.engine.inference.inputs import read_kept_saved, remedy
from stampede.engine.inference.same_inputs import check_trained_with
from stampede.engine.inference.trained import Trained

# Ids of fields whose values are rows of their tables already.
_ROWS = "rows"


def described_inputs(trained: Trained, kept: Path | None) -> dict[str, Any]:
    """Id fields and numbers in the model's order, and how they are made of columns.

    Args:
        trained: the model.
        kept: what `inputs_folder` found.

    Raises:
        RunFolderError, DataError: the vocabularies are damaged, or not the model's.
    """
    if kept is None:
        # Synthetic clicks.
        entries = [FieldEntry(name=n, rows=rows) for n, rows in trained.vocabulary_sizes.items()]
        return _of_rows(entries, [f"I{i + 1}" for i in range(trained.numbers)], "float32")
    manifest = check_trained_with(kept, trained, trained.checkpoint, remedy(kept))
    saved = read_kept_saved(kept)
    if saved is None:
        return _of_rows(manifest.fields, manifest.numbers, manifest.numbers_dtype)
    return _of_columns(manifest, saved)


def _of_rows(entries: list[FieldEntry], numbers: list[str], dtype: str) -> dict[str, Any]:
    return {
        "fields": [
            {
                **_common(entry, entry.name, "," if entry.multi else None, None),
                "encode": _ROWS,
                "size": entry.rows,
            }
            for entry in entries
        ],
        "numbers": [
            {"name": name, "column": name, "fill": 0.0, "transform": [], **_seen(0, 0, 0, 0)}
            for name in numbers
        ],
        "numbers_dtype": dtype,
        "missing": [""],
        "time": None,
    }


def _of_columns(manifest: Manifest, saved: Saved) -> dict[str, Any]:
    schema = saved.schema_
    timed = any(isinstance(field, TimePart) for field in schema.ids.values())
    numbers = []
    for name, field in schema.numbers.items():
        seen = saved.ranges[name]
        numbers.append(
            {
                "name": name,
                "column": field.column or name,
                "fill": field.fill,
                "transform": field.transform,
                **_seen(seen.low, seen.high, seen.mean, seen.deviation),
            }
        )
    return {
        "fields": [_field(entry, schema.ids[entry.name], saved) for entry in manifest.fields],
        "numbers": numbers,
        "numbers_dtype": manifest.numbers_dtype,
        "missing": schema.missing,
        "time": schema.time.model_dump() if timed else None,
    }


def _field(entry: FieldEntry, field: IdField, saved: Saved) -> dict[str, Any]:
    if isinstance(field, TimePart):
        return {**_common(entry, None, None, None), "encode": field.encode}
    column = field.column or entry.name
    if isinstance(field, Quantiles):
        edges = saved.quantiles[entry.name]
        return {**_common(entry, column, None, None), "encode": field.encode, "edges": edges}
    common = {
        **_common(entry, column, field.separator, field.max_ids),
        "encode": field.encode,
    }
    if isinstance(field, Hashed):
        return {**common, "buckets": field.buckets, "seed": field.seed}
    if isinstance(field, Integers):
        return {**common, "size": field.size}
    assert isinstance(field, Vocabulary)
    return {**common, "first_row": FIRST_ROW}


def _common(
    entry: FieldEntry, column: str | None, separator: str | None, max_ids: int | None
) -> dict[str, Any]:
    return {**entry.model_dump(), "column": column, "separator": separator, "max_ids": max_ids}


def _seen(low: float, high: float, mean: float, deviation: float) -> dict[str, float]:
    return {"low": low, "high": high, "mean": mean, "deviation": deviation}
