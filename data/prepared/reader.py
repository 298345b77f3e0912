"""Opens a prepared data set without reading it: every file memory-mapped and checked."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stampede.data.errors import DataError
from stampede.data.prepared.manifest import MANIFEST, Manifest, PartName, ShardEntry, read_manifest
from stampede.data.prepared.mapped import map_shard
from stampede.data.prepared.part import Shard, ShardedPart
from stampede.data.samples import Dataset
from stampede.settings import cut

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
        train=open_part(folder, manifest, "train"),
        validation=(
            open_part(folder, manifest, "validation") if manifest.rows("validation") else None
        ),
        test=open_part(folder, manifest, "test"),
        multi=tuple(entry.name for entry in manifest.multi()),
        has_weight=manifest.has_weight,
        unknown_rows={entry.name: entry.unknown_rows for entry in manifest.fields},
        features=cut(str(manifest.source.get("features", ""))),
        unseen_rows={
            entry.name: entry.unseen_row
            for entry in manifest.fields
            if entry.unseen_row is not None
        },
    )


def open_part(folder: Path, manifest: Manifest, part: PartName) -> ShardedPart:
    """A part of a prepared folder, memory-mapped.

    Raises:
        DataError: a file of it is absent or not as the manifest says.
    """
    return ShardedPart(
        tuple(_open_shard(folder, manifest, shard) for shard in manifest.parts[part])
    )


def _open_shard(folder: Path, manifest: Manifest, shard: ShardEntry) -> Shard:
    names = [name for name in manifest.arrays() if name not in _NOT_READ]
    maps = map_shard(folder, manifest, shard, names)
    return Shard(shard.rows, {name: _as_tensor(array) for name, array in maps.items()}, maps)


def _as_tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        # The map cannot be written; nothing here tries to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
