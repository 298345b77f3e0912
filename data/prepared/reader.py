"""Opens a prepared data set without reading it: every file memory-mapped and checked."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stampede.data.errors import DataError
from stampede.data.prepared.manifest import MANIFEST, Manifest, PartName, ShardEntry, read_manifest
from stampede.data.prepared.part import Shard, ShardedPart
from stampede.data.samples import Dataset

# Only what a batch needs.
_NOT_READ = ("time",)


def open_prepared(folder: Path) -> Dataset:
    """The data set in a prepared folder, memory-mapped.

    Raises:
        DataError: the folder is no prepared data set, or a file of it is absent or not as the
            manifest says.
    """
    manifest = read_manifest(folder)
    for part in ("train", "test"):
        if not manifest.rows(part):
            raise DataError(
                f"{folder / MANIFEST}: the {part} part has no rows; choose another split to "
                "prepare the data again"
            )
    return Dataset(
        vocabulary_sizes={entry.name: entry.rows for entry in manifest.fields},
        numbers=len(manifest.numbers),
        train=_open_part(folder, manifest, "train"),
        validation=(
            _open_part(folder, manifest, "validation") if manifest.rows("validation") else None
        ),
        test=_open_part(folder, manifest, "test"),
        multi=tuple(entry.name for entry in manifest.multi()),
        has_weight=manifest.has_weight,
    )


def _open_part(folder: Path, manifest: Manifest, part: PartName) -> ShardedPart:
    return ShardedPart(
        tuple(_open_shard(folder, manifest, shard) for shard in manifest.parts[part])
    )


def _open_shard(folder: Path, manifest: Manifest, shard: ShardEntry) -> Shard:
    maps = {}
    for name in manifest.arrays():
        if name not in _NOT_READ:
            maps[name] = _map(folder, shard, name, *_expected(manifest, name))
    for i in range(len(manifest.multi())):
        offsets, values = maps[f"offsets_{i}"], maps[f"values_{i}"]
        if offsets[0] != 0 or offsets[-1] != len(values):
            raise _damaged(
                folder / shard.files[f"offsets_{i}"].name,
                f"runs from {offsets[0]} to {offsets[-1]}, but there are {len(values)} values",
            )
    return Shard(shard.rows, {name: _as_tensor(array) for name, array in maps.items()}, maps)


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
    return {"label": "uint8", "weight": "float32"}[name], None, 0


def _map(
    folder: Path, shard: ShardEntry, name: str, dtype: str, columns: int | None, more: int
) -> np.memmap:
    """Map a file after checking its length, shape and type."""
    entry = shard.files[name]
    path = folder / entry.name
    try:
        found = path.stat().st_size
        if found != entry.bytes:
            raise _damaged(path, f"has {found:,} bytes instead of {entry.bytes:,}")
        # Never unpickles, unlike np.load; a header that promises more than the file holds fails.
        array = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise _damaged(path, "is absent") from None
    except (OSError, ValueError, TypeError, OverflowError, MemoryError) as failure:
        raise _damaged(path, f"cannot be mapped ({failure})") from None
    # How many values there are is known from the offsets only.
    rows = len(array) if name.startswith("values_") and array.ndim else shard.rows + more
    shape = (rows,) if columns is None else (rows, columns)
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise _damaged(
            path, f"holds {array.dtype} {list(array.shape)} instead of {dtype} {list(shape)}"
        )
    if not array.flags.c_contiguous:
        raise _damaged(path, "has its columns instead of its rows one after the other")
    return array


def _damaged(path: Path, what: str) -> DataError:
    return DataError(
        f"{path}: {what}; delete the folder to prepare the data again, or see what else is wrong "
        f"with: python -m stampede.data.prepare --verify {path.parent}"
    )


def _as_tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        # The map cannot be written; nothing here tries to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
