"""Files that are written as a whole or not at all, and strict JSON for them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8, so that it is never seen half-written."""
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def to_json(values: Any, indent: int | None = None) -> str:
    """Strict JSON; null for numbers that are not finite."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_finite(value) for value in values]
    if isinstance(values, float) and not math.isfinite(values):
        return None
    return values
