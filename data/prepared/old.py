"""Prepared data sets: arrays on disk that appear whole or not at all, memory-mapped to read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stampede.data.errors import DataError
from stampede.data.samples import Dataset, Samples, Slice

# Part of every cache name: a change of layout or meaning makes old caches invisible.
FORMAT = 1

_MANIFEST = "manifest.json"
_ARRAYS = ("ids", "dense", "label")


@dataclass(frozen=True)
class PartSizes:
    """Rows of each part; they stand in this order in the arrays."""

    train: int
    validation: int
    test: int


@dataclass(frozen=True)
class PreparedArrays:
    """A prepared data set in memory.

    Attributes:
        ids: `[rows, fields]` int32, row of each field's table.
        dense: `[rows, numbers]` float32.
        label: `[rows]` uint8.
        vocabulary_sizes: rows of each field's table, in the order of `ids`.
        parts: rows of training, validation and test part.
    """

    ids: np.ndarray
    dense: np.ndarray
    label: np.ndarray
    vocabulary_sizes: dict[str, int]
    parts: PartSizes


def cached(source: Path, options: Any, prepare: Callable[[], PreparedArrays], cache: Path) -> Path:
    """Folder with the prepared form of a file, made on first use.

    Its name holds a hash of the file's content and of the options. It is written under another
    name and renamed when whole.

    Args:
        source: the raw file.
        options: a dataclass; everything that the result depends on besides the file.
        prepare: makes the arrays.
        cache: folder of all prepared data sets.

    Raises:
        DataError: the source cannot be read or the cache cannot be written.
    """
    described = {"format": FORMAT, "kind": type(options).__name__, **asdict(options)}
    try:
        described["content"] = _content_hash(source)
    except OSError as failure:
        raise DataError(
            f"{source}: {failure.strerror or failure}; set data.path to the click log"
        ) from None
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:20]
    folder = cache / f"{source.name.split('.')[0]}-{name}"
    if not folder.is_dir():
        arrays = prepare()
        try:
            _write(folder, arrays, described)
        except OSError as failure:
            raise DataError(
                f"{folder}: the prepared data cannot be written ({failure.strerror or failure}); "
                "free some space, or set data.cache to another folder"
            ) from None
    return folder


def open_prepared(folder: Path) -> Dataset:
    """The data set in a folder that `cached` returned, memory-mapped.

    Raises:
        DataError: the folder is damaged.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS]
        parts = PartSizes(**manifest["parts"])
        if {len(array) for array in arrays} != {parts.train + parts.validation + parts.test}:
            raise ValueError("arrays and manifest disagree on the number of rows")
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise DataError(
            f"{folder}: damaged prepared data ({failure}); delete this folder to prepare it again"
        ) from None
    whole = _ArrayPart(*arrays)
    ends = np.cumsum([0, parts.train, parts.validation, parts.test])
    train, validation, test = (
        Slice(whole, int(start), int(stop)) for start, stop in pairwise(ends)
    )
    return Dataset(
        vocabulary_sizes=manifest["vocabulary_sizes"],
        numbers=arrays[1].shape[1],
        train=train,
        validation=validation if validation.rows else None,
        test=test,
    )


@dataclass(frozen=True)
class _ArrayPart:
    """All rows of a prepared data set."""

    ids: np.ndarray
    dense: np.ndarray
    label: np.ndarray
    shuffle: bool = True

    @property
    def rows(self) -> int:
        return len(self.label)

    def read(self, rows: np.ndarray) -> Samples:
        return Samples(self.ids[rows], self.dense[rows], self.label[rows])


def _content_hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=20)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _write(folder: Path, arrays: PreparedArrays, described: dict[str, Any]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f".{folder.name}-{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        for name in _ARRAYS:
            np.save(unfinished / f"{name}.npy", getattr(arrays, name))
        manifest = {
            "options": described,
            "parts": asdict(arrays.parts),
            "vocabulary_sizes": arrays.vocabulary_sizes,
        }
        (unfinished / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if not folder.exists():  # another run may have been faster
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
