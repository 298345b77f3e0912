"""A prepared folder written in the layout of TorchRec's Criteo readers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stampede.data.errors import DataError
from stampede.data.npy_layout.arrays import blocks, open_array, write_array
from stampede.data.prepared.manifest import PARTS, Manifest, PartName, read_manifest
from stampede.data.prepared.whole_folder import make_whole
from stampede.data.progress import RowProgress

# Beside the arrays; says what they cannot.
LAYOUT = "layout.json"
README = "README.txt"

PREFIXES: dict[PartName, str] = {"train": "train", "validation": "val", "test": "test"}

_TEXT = """\
Written by stampede from {folder}.

train_*, val_* and test_* are training, validation and test part:
  *_dense.npy   float32 [rows, {numbers}], transformed numbers
  *_sparse.npy  {ids_dtype} [rows, {fields}], row of each field's table
  *_labels.npy  int32 [rows, 1], 0 or 1
layout.json has names, vocabulary sizes (rows of each table) and the rows of missing and unseen ids.

torchrec.datasets.criteo.InMemoryBinaryCriteoIterDataPipe reads them. Read every part with
stage="train": stage="val" and "test" each take one half of their first file. TorchRec 1.6 also
needs hashes: pass the vocabulary sizes, which changes no id.
"""


def export(folder: Path, out: Path) -> None:
    """Write a prepared folder as `train_dense.npy`, `train_sparse.npy`, `train_labels.npy`, ...

    Weights and times are left out, as the layout has no place for them. Memory does not depend on
    the number of rows.

    Args:
        folder: the prepared data; all fields single-valued.
        out: new folder; appears when it is whole.

    Raises:
        DataError: the folder is damaged or has multi-valued fields, or `out` cannot be written.
    """
    manifest = read_manifest(folder)
    many = manifest.multi()
    if many:
        raise DataError(
            f"{folder}: field {many[0].name!r} has several ids per sample, for which this layout "
            "has no place; prepare the data without it"
        )
    if out.exists():
        raise DataError(f"{out}: exists already; choose a new folder")
    make_whole(out, lambda unfinished: _write(manifest, folder, unfinished))


def _write(manifest: Manifest, folder: Path, out: Path) -> None:
    shapes = {
        "dense": ("numbers", len(manifest.numbers), "float32"),
        "sparse": ("ids", len(manifest.fields), manifest.ids_dtype),
        "labels": ("label", 1, "int32"),
    }
    parts = [part for part in PARTS if manifest.rows(part)]
    sizes = {
        (part, name): sum(shard.files[array].bytes for shard in manifest.parts[part])
        for part in parts
        for name, (array, _, _) in shapes.items()
    }
    with RowProgress("exporting", sum(sizes.values())) as progress:
        for (part, name), size in sizes.items():
            array, width, dtype = shapes[name]
            path = out / f"{PREFIXES[part]}_{name}.npy"
            shape = (manifest.rows(part), width)
            write_array(path, _rows(manifest, folder, part, array, width), shape, dtype)
            progress.advance_bytes(size)
    layout = {
        "fields": [entry.model_dump() for entry in manifest.fields],
        "numbers": manifest.numbers,
        "rows": {PREFIXES[part]: manifest.rows(part) for part in parts},
    }
    (out / LAYOUT).write_text(json.dumps(layout, indent=1), encoding="utf-8")
    text = _TEXT.format(
        folder=folder,
        numbers=len(manifest.numbers),
        fields=len(manifest.fields),
        ids_dtype=manifest.ids_dtype,
    )
    (out / README).write_text(text, encoding="utf-8")


def _rows(
    manifest: Manifest, folder: Path, part: PartName, name: str, width: int
) -> Iterator[np.ndarray]:
    for shard in manifest.parts[part]:
        path = folder / shard.files[name].name
        array = open_array(path)
        if array.size != shard.rows * width:
            raise DataError(
                f"{path}: found the shape {array.shape}, the manifest says {shard.rows} rows; "
                "prepare the data again"
            )
        yield from blocks(array.reshape(shard.rows, width))
