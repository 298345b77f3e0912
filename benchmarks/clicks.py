"""Prepared Criteo-like clicks: id fields and 13 numbers, ids by a power law."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from stampede.data.synthetic import NUMBERS, SyntheticClicks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.prepared import write_prepared

# Exponent of the ids' frequencies. With it, a batch of 8192 has some 36,000 distinct ids of 2.6
# million, and one of 65536 some 150,000, as in the real log (issue 5).
EXPONENT = 1.02

IDS, FIELDS = 2_600_000, 26


def cardinalities(ids: int = IDS, fields: int = FIELDS) -> list[int]:
    """Ids of each field for `ids` in total, in the proportions of Criteo Kaggle.

    Fewer than 26 fields are the first ones; more repeat them.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        scale = (low + high) / 2
        low, high = (scale, high) if sum(_sizes(scale, fields)) < ids else (low, scale)
    return _sizes(high, fields)


def _sizes(scale: float, fields: int) -> list[int]:
    criteo = SyntheticClicks(scale=scale).cardinalities()
    return [criteo[field % len(criteo)] for field in range(fields)]


def write_clicks(folder: Path, rows: int, ids: int = IDS, fields: int = FIELDS) -> Path:
    """Write a prepared folder, unless it exists: so many training rows and 1000 test rows.

    Args:
        ids: rows of all tables together.
        fields: number of tables.
    """
    target = folder / f"clicks-{rows}-{ids}-{fields}"
    if not (target / "manifest.json").exists():
        sizes, parts = cardinalities(ids, fields), {}
        for seed, (part, many) in enumerate([("train", rows), ("test", 1000)]):
            draw = np.random.default_rng(seed)
            parts[part] = {
                "ids": drawn_ids(draw, many, sizes),
                "numbers": draw.random((many, NUMBERS), np.float32),
                "label": (draw.random(many) < 0.26).astype(np.uint8),
            }
        write_prepared(target, parts, {f"C{i + 1}": (n, False) for i, n in enumerate(sizes)})
    return target


def drawn_ids(draw: np.random.Generator, rows: int, sizes: list[int]) -> np.ndarray:
    """Ids `[rows, fields]` int32; 0 is the most frequent id of a field."""
    ids = np.empty((rows, len(sizes)), np.int32)
    for field, size in enumerate(sizes):
        # The inverse of a power law over [1, size + 1), cut into ids.
        power = 1.0 - EXPONENT
        top = (size + 1.0) ** power - 1.0
        places = (1.0 + draw.random(rows) * top) ** (1.0 / power) - 1.0
        ids[:, field] = np.minimum(places, size - 1)
    return ids
