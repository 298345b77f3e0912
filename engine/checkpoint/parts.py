"""The parts of a manifest, one after the other: the first that is damaged ends it.

pydantic finds all errors and keeps some 2 kB for each: gigabytes where somebody has written a
million of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from stampede.engine.checkpoint.layout import ChunkEntry, TensorEntry
from stampede.engine.checkpoint.states import Count
from stampede.files import FileEntry

# Of a part as JSON, without its own parts: a thousand logged losses take 25,000.
_MOST_CHARACTERS = 100_000

_COUNT = TypeAdapter(Count)


def check_parts(values: Mapping[str, Any], table_entry: type[BaseModel]) -> None:
    """Check tensors, tables, files and sizes of vocabularies, and that little else is there.

    Args:
        values: a manifest, as it is read from JSON.
        table_entry: what a table is described by.

    Raises:
        ValueError: which one is not as it should be.
    """
    for name, tensor in _parts(values, "tensors"):
        for number, chunk in _parts(tensor, "chunks"):
            _check(ChunkEntry.model_validate_json, chunk, f"tensors.{name}.chunks.{number}")
        _check_length(tensor, "chunks", f"tensors.{name}")
        _check(TensorEntry.model_validate_json, tensor, f"tensors.{name}", None)
    for key, entry in (("tables", table_entry), ("files", FileEntry)):
        for name, part in _parts(values, key):
            _check(entry.model_validate_json, part, f"{key}.{name}")
    data = values.get("data")
    for field, rows in _parts(data, "vocabulary_sizes"):
        _check(_COUNT.validate_json, rows, f"data.vocabulary_sizes.{field}")
    _check_length(data, "vocabulary_sizes", "data")
    for key in values.keys() - {"tensors", "tables", "files", "data", "config"}:
        _check_length(values[key], "", key)
    _check_length([*values], "", "manifest.json")


def _parts(values: Any, key: str) -> Iterable[tuple[Any, Any]]:
    """What is there under a key, by name or by number; nothing where it is neither."""
    found = values.get(key) if isinstance(values, dict) else None
    if isinstance(found, dict):
        return found.items()
    return enumerate(found if isinstance(found, list) else ())


def _check(
    validate: Any, part: Any, where: str, most_characters: int | None = _MOST_CHARACTERS
) -> None:
    text = json.dumps(part)
    if most_characters is not None and len(text) > most_characters:
        raise ValueError(f"{_line(where)}: larger than any")
    try:
        validate(text)
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, (where, *first["loc"])))
        raise ValueError(f"{_line(place)}: {first['msg']}") from None


def _check_length(part: Any, without: str, where: str) -> None:
    own = {k: v for k, v in part.items() if k != without} if isinstance(part, dict) else part
    if len(json.dumps(own)) > _MOST_CHARACTERS:
        raise ValueError(f"{_line(where)}: larger than any")


def _line(where: str) -> str:
    """Names from elsewhere on one line."""
    return f"{where:.200}".replace("\n", "\\n")
