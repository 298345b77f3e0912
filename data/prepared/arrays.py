"""The arrays of a prepared data set: memory-mapped and compared with the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from stampede.data.errors import DataError
from stampede.data.prepared.manifest import Manifest, ShardEntry
from stampede.files import FileEntry, difference

_PIECE_BYTES = 1 << 24


def map_shard(
    folder: Path, manifest: Manifest, shard: ShardEntry, names: Iterable[str]
) -> dict[str, np.memmap]:
    """Map some arrays of a shard without reading them; with offsets also their values.

    Raises:
        DataError: a file is absent or not as the manifest says.
    """
    maps = {}
    for name in names:
        dtype, columns, more = _expected(manifest, name)
        entry = shard.files[name]
        path = folder / entry.name
        array = _map(path, entry)
        # Only the offsets tell the number of values.
        rows = len(array) if name.startswith("values_") and array.ndim else shard.rows + more
        shape = (rows,) if columns is None else (rows, columns)
        if array.shape != shape or array.dtype != np.dtype(dtype):
            raise damaged(
                path, f"holds {array.dtype} {list(array.shape)} instead of {dtype} {list(shape)}"
            )
        if not array.flags.c_contiguous:
            raise damaged(path, "is stored column by column; row by row is needed")
        maps[name] = array
    for name, offsets in maps.items():
        if name.startswith("offsets_"):
            values = maps[values_of(name)]
            if offsets[0] != 0 or offsets[-1] != len(values):
                raise damaged(
                    folder / shard.files[name].name,
                    f"runs from {offsets[0]} to {offsets[-1]}, but there are {len(values)} values",
                )
    return maps


def values_of(offsets: str) -> str:
    """Name of the array that an array of offsets points into."""
    return offsets.replace("offsets_", "values_")


def damaged(path: Path, what: str) -> DataError:
    """The error for a file of a prepared folder that cannot be used."""
    return DataError(
        f"{path}: {what}; delete the folder to prepare the data again, or list all damage with: "
        f"stampede prepare --verify {path.parent}"
    )


def _expected(manifest: Manifest, name: str) -> tuple[str, int | None, int]:
    """Type of an array, its columns (None: it has one dimension) and rows beyond the shard's."""
    if name == "ids":
        return manifest.ids_dtype, len(manifest.single()), 0
    if name == "numbers":
        return manifest.numbers_dtype, len(manifest.numbers), 0
    if name.startswith("values_"):
        return manifest.ids_dtype, None, 0
    if name.startswith("offsets_"):
        return "int64", None, 1
    return {"label": "uint8", "weight": "float32", "time": "int64"}[name], None, 0


def _map(path: Path, entry: FileEntry) -> np.memmap:
    what = difference(path, entry, content=False)
    if what:
        raise damaged(path, what)
    try:
        # Never unpickles, unlike np.load; a header that promises more than the file holds fails.
        return np.lib.format.open_memmap(path, mode="r")
    # numpy hands the header to Python's parser, which may raise any exception.
    except Exception as failure:
        raise damaged(path, f"cannot be mapped ({type(failure).__name__}: {failure})") from None


def impossible(manifest: Manifest, name: str, array: np.ndarray) -> Iterator[str]:
    """Describe the first impossible value in each piece of a shard's array.

    Ids must have a row in their table, labels be 0 or 1, numbers and weights finite, weights not
    negative; offsets must ascend. Rows are counted from 0.
    """
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
    """Which values of some rows are impossible; None if every value is possible."""
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
