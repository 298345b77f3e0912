"""Checks that the arrays of a prepared data set hold what can be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stampede.data.errors import DataError
from stampede.data.prepared.manifest import Manifest, ShardEntry
from stampede.data.prepared.mapped import map_shard

_PIECE_BYTES = 1 << 24


def impossible_values(folder: Path, manifest: Manifest, shard: ShardEntry) -> list[str]:
    """What is wrong with the values of a shard: of each array its first impossible one.

    Reads the arrays piece by piece. Ids must have a row in their table, labels be 0 or 1, numbers
    and weights finite, weights not negative; offsets must ascend.

    Returns:
        Sentences that begin with the file and name the row, counted from 0.
    """
    try:
        maps = map_shard(folder, manifest, shard, manifest.arrays())
    except DataError as failure:
        return [str(failure)]
    found = []
    for name, array in maps.items():
        reason = next(_impossible(manifest, name, array), None)
        if reason is not None:
            found.append(f"{folder / shard.files[name].name}: {reason}")
    return found


def _impossible(manifest: Manifest, name: str, array: np.ndarray) -> Iterator[str]:
    """The first impossible value of each piece."""
    # Neighbours of offsets are compared.
    overlap = int(name.startswith("offsets_"))
    step = max(_PIECE_BYTES // max(array[:1].nbytes, 1), 1)
    for start in range(0, len(array), step):
        piece = array[start : start + step + overlap]
        wrong = _wrong(manifest, name, piece)
        if wrong is not None and wrong.any():
            row, *column = np.argwhere(wrong)[0].tolist()
            value = piece[(row, *column)]
            yield f"row {start + row}: {_reason(manifest, name, value, column)}"


def _wrong(manifest: Manifest, name: str, piece: np.ndarray) -> np.ndarray | None:
    """Which values of some rows are impossible; None where any is possible."""
    kind, _, number = name.partition("_")
    if kind == "ids":
        return (piece < 0) | (piece >= np.array([entry.rows for entry in manifest.single()]))
    if kind == "values":
        return (piece < 0) | (piece >= manifest.multi()[int(number)].rows)
    if kind == "offsets":
        return piece[1:] < piece[:-1]
    if kind == "label":
        return piece > 1
    if kind == "numbers":
        return ~np.isfinite(piece)
    if kind == "weight":
        return ~(np.isfinite(piece) & (piece >= 0))
    return None


def _reason(manifest: Manifest, name: str, value: np.generic, column: list[int]) -> str:
    kind, _, number = name.partition("_")
    if kind in ("ids", "values"):
        entry = manifest.single()[column[0]] if column else manifest.multi()[int(number)]
        return f"id {value} of field {entry.name!r}, whose table has the rows 0 to {entry.rows - 1}"
    if kind == "offsets":
        return f"{value} is followed by a smaller number"
    if kind == "label":
        return f"the label {value} instead of 0 or 1"
    if kind == "numbers":
        return f"{value} for the number {manifest.numbers[column[0]]!r}"
    return f"the weight {value}; weights are finite and not negative"
