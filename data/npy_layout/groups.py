"""Which files of a folder hold which part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stampede.data.errors import DataError
from stampede.data.npy_layout.arrays import open_array
from stampede.data.prepared.manifest import PartName

ARRAYS = ("dense", "sparse", "labels")

# What is accepted, and what the layout says.
_WIDEST = {"dense": np.float64, "sparse": np.int64, "labels": np.float64}
_TYPES = {"dense": "float32", "sparse": "int32 or int64", "labels": "int32"}

# TorchRec's `sparse_to_contiguous` adds the ending.
CONTIGUOUS = "_contig_freq"
_NAME = re.compile(rf"(?P<group>.+)_(?P<array>dense|sparse|labels)({CONTIGUOUS})?\.npy")
_PART = re.compile(r"(train|val|valid|validation|test)([_-]?\d+)?")
_DAY = re.compile(r"day_(\d+)")
_EXPECTED = (
    "write train_dense.npy, train_sparse.npy and train_labels.npy, the same for val and test, or "
    "day_0_dense.npy and so on, of which the last day is halved into validation and test"
)


@dataclass(frozen=True)
class Group:
    """Three files of the same rows, memory-mapped.

    Attributes:
        name: what their names have in common.
        paths: by array.
        arrays: by array; labels flat.
    """

    name: str
    paths: dict[str, Path]
    arrays: dict[str, np.ndarray]

    @property
    def rows(self) -> int:
        """Of each array."""
        return len(self.arrays["labels"])


@dataclass(frozen=True)
class Range:
    """Rows `start` to `stop - 1` of a group, and their part."""

    part: PartName
    group: Group
    start: int
    stop: int


def find_ranges(folder: Path) -> list[Range]:
    """All rows of a folder's files, part by part, days in order.

    Days are divided as MLPerf does: the last one's first half is for validation, the other half
    for the test.

    Raises:
        DataError: files are absent, do not fit together, or their names tell no part.
    """
    groups = [_open(folder, name, paths) for name, paths in _grouped(folder).items()]
    _check_widths(groups)
    days = [group for group in groups if _DAY.fullmatch(group.name)]
    if len(days) == len(groups):
        return _by_day(folder, days)
    ranges = []
    for group in groups:
        named = _PART.fullmatch(group.name)
        if named is None:
            raise DataError(
                f"{folder}: the name of {group.paths['dense'].name} does not tell which part it "
                f"is; {_EXPECTED}"
            )
        word = named.group(1)
        part: PartName = "validation" if word.startswith("val") else word
        ranges.append(Range(part, group, 0, group.rows))
    for part in ("train", "test"):
        if not any(found.part == part for found in ranges):
            raise DataError(f"{folder}: no files of the {part} part; {_EXPECTED}")
    return ranges


def _by_day(folder: Path, days: Sequence[Group]) -> list[Range]:
    if len(days) < 2:
        raise DataError(f"{folder}: found {days[0].name} alone, need two days or more; {_EXPECTED}")
    *training, last = days
    half = last.rows - last.rows // 2
    if half == last.rows:
        raise DataError(f"{folder}: {last.name} has {last.rows} row, too few for two halves")
    return [
        *(Range("train", day, 0, day.rows) for day in training),
        Range("validation", last, 0, half),
        Range("test", last, half, last.rows),
    ]


def _grouped(folder: Path) -> dict[str, dict[str, Path]]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; write the one with the .npy files")
    groups: dict[str, dict[str, Path]] = {}
    for path in folder.glob("*.npy"):
        named = _NAME.fullmatch(path.name)
        if named is None:
            raise DataError(
                f"{path}: its name ends with none of _dense.npy, _sparse.npy, _labels.npy; "
                "move it elsewhere"
            )
        group = groups.setdefault(named["group"], {})
        if named["array"] in group:
            raise DataError(
                f"{path}: {group[named['array']].name} holds the same rows; keep one of the two"
            )
        group[named["array"]] = path
    if not groups:
        raise DataError(f"{folder}: no .npy file; {_EXPECTED}")
    for name, group in groups.items():
        absent = [array for array in ARRAYS if array not in group]
        if absent:
            raise DataError(f"{folder}: {name}_{absent[0]}.npy is absent; {_EXPECTED}")
    return {name: groups[name] for name in sorted(groups, key=_naturally)}


def _naturally(name: str) -> list[int | str]:
    parts = re.split(r"(\d+)", name)
    return [int(part) if part.isdigit() else part for part in parts]


def _open(folder: Path, name: str, paths: dict[str, Path]) -> Group:
    arrays = {array: open_array(paths[array]) for array in ARRAYS}
    for array, found in arrays.items():
        if not np.can_cast(found.dtype, _WIDEST[array]):
            raise DataError(f"{paths[array]}: found type {found.dtype}; write {_TYPES[array]}")
    labels = arrays["labels"]
    if labels.ndim not in (1, 2) or labels.size != len(labels):
        raise DataError(f"{paths['labels']}: found the shape {labels.shape}; write [rows, 1]")
    arrays["labels"] = labels.reshape(-1)
    for array in ("dense", "sparse"):
        shape = arrays[array].shape
        if len(shape) != 2:
            raise DataError(f"{paths[array]}: found the shape {shape}; write [rows, columns]")
        if shape[0] != len(labels):
            raise DataError(
                f"{paths[array]}: found {shape[0]} rows, but {len(labels)} in "
                f"{paths['labels'].name}; all three files need the same rows"
            )
    if not len(labels):
        raise DataError(f"{paths['labels']}: has no row; remove {name}_*.npy")
    return Group(name, paths, arrays)


def _check_widths(groups: Sequence[Group]) -> None:
    first = groups[0]
    for group in groups[1:]:
        for array in ("dense", "sparse"):
            found, expected = group.arrays[array].shape[1], first.arrays[array].shape[1]
            if found != expected:
                raise DataError(
                    f"{group.paths[array]}: found {found} columns, but {expected} in "
                    f"{first.paths[array].name}; all files need the same columns"
                )
    if not first.arrays["sparse"].shape[1]:
        raise DataError(f"{first.paths['sparse']}: has no column; need one id field or more")
