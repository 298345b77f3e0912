"""Imports the `.npy` files of TorchRec's and MLPerf's Criteo readers as a prepared folder.

`python -m stampede.data.criteo_npy FOLDER OUT`

A set of samples is three files: `*_dense.npy` float32 `[n, numbers]`, `*_sparse.npy` int32 or int64
`[n, fields]`, `*_labels.npy` int32 `[n, 1]`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from stampede.data.errors import DataError, exit_status
from stampede.data.prepared.manifest import (
    MANIFEST,
    PARTS,
    FieldEntry,
    Manifest,
    PartName,
    prepared_summary,
)
from stampede.data.prepared.verify import record_verified
from stampede.data.prepared.writer import PartWriter
from stampede.data.progress import RowProgress
from stampede.files import make_folder

BLOCK_ROWS = 1 << 18
_SHARD_ROWS = 1 << 22

# The widest accepted type of each array.
_TYPES = {"dense": np.float64, "sparse": np.int64, "labels": np.float64}

# TorchRec's `sparse_to_contiguous` adds this ending; in its files all rare ids share row 1.
_CONTIGUOUS = "_contig_freq"
_RARE = 1
_NAME = re.compile(
    rf"(?P<set>train|val|test|day_\d+)_(?P<array>dense|sparse|labels)({_CONTIGUOUS})?\.npy"
)
_PARTS: dict[str, PartName] = {"train": "train", "val": "validation", "test": "test"}
_EXPECTED = (
    "write train_dense.npy, train_sparse.npy and train_labels.npy, the same for val and test, or "
    "day_0_dense.npy and so on; the last day is then halved into validation and test"
)


@dataclass(frozen=True)
class _Set:
    """Three files of the same rows, memory-mapped, by array; labels are flat."""

    name: str
    paths: dict[str, Path]
    arrays: dict[str, np.ndarray]

    @property
    def rows(self) -> int:
        return len(self.arrays["labels"])

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """The rows from `start` to `stop - 1`, and the number of each block's first row."""
        for first in range(start, stop, BLOCK_ROWS):
            rows = slice(first, min(first + BLOCK_ROWS, stop))
            yield first, {name: array[rows] for name, array in self.arrays.items()}


# A part, and the rows `start` to `stop - 1` of a set that belong to it.
_Range = tuple[PartName, _Set, int, int]


def import_criteo_npy(
    folder: Path, out: Path, *, sizes: Sequence[int] | None = None, modulo: bool = False
) -> None:
    """Make a prepared folder of `*_dense.npy`, `*_sparse.npy` and `*_labels.npy`.

    The parts are `train_*`, `val_*` and `test_*`, or days, of which the last is halved into
    validation and test, as MLPerf does. Memory does not depend on the number of rows.

    Args:
        folder: with the files.
        out: new folder; it appears only when it is complete.
        sizes: rows of each field's table; one for all, or one per field. None: the largest id plus
            one.
        modulo: take ids modulo the sizes, as TorchRec's readers do with `hashes`.

    Raises:
        DataError: the files cannot be used, or `out` cannot be written.
    """
    if modulo and sizes is None:
        raise DataError("modulo needs the sizes of the tables; write --sizes")
    if out.exists():
        raise DataError(f"{out}: already exists; choose a new folder")
    ranges = _ranges(folder)
    sets = list({found.name: found for _, found, _, _ in ranges}.values())
    width, numbers = (sets[0].arrays[name].shape[1] for name in ("sparse", "dense"))
    given = None if sizes is None else _size_per_field(sizes, width)
    largest = _check(sets, None if modulo else given)
    contiguous = all(found.paths["sparse"].stem.endswith(_CONTIGUOUS) for found in sets)
    rows = given or [id + 1 for id in largest]
    manifest = Manifest(
        version=metadata.version("stampede"),
        fields=[
            FieldEntry(
                name=f"C{i + 1}",
                rows=size,
                unseen_row=_RARE if contiguous and size > _RARE else None,
            )
            for i, size in enumerate(rows)
        ],
        numbers=[f"I{i + 1}" for i in range(numbers)],
        ids_dtype="int32" if max(rows) <= 2**31 else "int64",
        parts={},
        source={"files": str(folder), "modulo": modulo},
    )
    divisors = np.array(given) if modulo else None
    make_folder(out, lambda unfinished: _write(ranges, manifest, divisors, unfinished), DataError)


def _ranges(folder: Path) -> list[_Range]:
    """All rows of a folder's files with their parts, days in order."""
    paths: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*.npy")):
        named = _NAME.fullmatch(path.name)
        if named is None:
            raise DataError(f"{path}: not a file name of this layout; {_EXPECTED}")
        other = paths.setdefault(named["set"], {}).setdefault(named["array"], path)
        if other != path:
            raise DataError(f"{path}: {other.name} holds the same rows; keep one of the two")
    sets = {name: _open(folder, name, found) for name, found in paths.items()}
    widths = {
        tuple(found.arrays[a].shape[1] for a in ("dense", "sparse")) for found in sets.values()
    }
    if len(widths) > 1:
        raise DataError(
            f"{folder}: found files with {' and '.join(map(str, sorted(widths)))} columns of "
            "numbers and ids; all files need the same columns"
        )
    if {"train", "test"} <= sets.keys() <= _PARTS.keys():
        return [(_PARTS[name], found, 0, found.rows) for name, found in sets.items()]
    if len(sets) > 1 and not sets.keys() & _PARTS.keys():
        *training, last = sorted(sets.values(), key=lambda day: int(day.name[len("day_") :]))
        half = last.rows - last.rows // 2
        days: list[_Range] = [("train", day, 0, day.rows) for day in training]
        return [*days, ("validation", last, 0, half), ("test", last, half, last.rows)]
    there = ", ".join(f"{name}_*.npy" for name in paths) or "no .npy file"
    raise DataError(f"{folder}: found {there}; {_EXPECTED}")


def _open(folder: Path, name: str, paths: dict[str, Path]) -> _Set:
    arrays = {}
    for array in _TYPES:
        if array not in paths:
            raise DataError(f"{folder}: {name}_{array}.npy is missing; {_EXPECTED}")
        try:
            arrays[array] = np.load(paths[array], mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as failure:
            raise DataError(f"{paths[array]}: cannot be read as an array ({failure})") from None
    dense, sparse, labels = arrays.values()
    same_rows = len(dense) == len(sparse) == len(labels) == labels.size > 0
    fits = all(np.can_cast(arrays[array].dtype, widest) for array, widest in _TYPES.items())
    if not (same_rows and fits and dense.ndim == sparse.ndim == 2 and sparse.shape[1]):
        shapes = ", ".join(f"{a} {x.dtype} {list(x.shape)}" for a, x in arrays.items())
        raise DataError(
            f"{folder}: {name}_*.npy hold {shapes}; write dense float32 [rows, numbers], sparse "
            "int32 or int64 [rows, fields], labels int32 [rows, 1], all of the same rows"
        )
    return _Set(name, paths, arrays | {"labels": labels.reshape(-1)})


def _size_per_field(sizes: Sequence[int], fields: int) -> list[int]:
    sizes = list(sizes) * (fields if len(sizes) == 1 else 1)
    if len(sizes) != fields or min(sizes) < 1:
        raise DataError(
            f"sizes: found {', '.join(map(str, sizes))}; write one number of 1 or more for all "
            f"fields, or {fields} of them"
        )
    return sizes


def _check(sets: Sequence[_Set], sizes: Sequence[int] | None) -> list[int]:
    """Check all values; returns the largest id of each field."""
    fields = sets[0].arrays["sparse"].shape[1]
    limits = np.array(sizes or [np.iinfo(np.int64).max] * fields)
    largest = np.zeros(fields, dtype=np.int64)
    with RowProgress("checking", sum(found.rows for found in sets)) as progress:
        for found in sets:
            for start, block in found.blocks(0, found.rows):
                ids = block["sparse"]
                for array, bad, remedy in (
                    ("labels", ~np.isin(block["labels"], (0, 1)), "write 0 or 1"),
                    ("dense", ~np.isfinite(block["dense"]), "write finite numbers"),
                    ("sparse", (ids < 0) | (ids >= limits), "write 0 to the table's rows - 1"),
                ):
                    if bad.any():
                        row, *column = np.argwhere(bad)[0].tolist()
                        where = f"row {start + row}" + "".join(f", column {i}" for i in column)
                        raise DataError(
                            f"{found.paths[array]}: {where} (from 0): found "
                            f"{block[array][(row, *column)]}; {remedy}"
                        )
                largest = np.maximum(largest, ids.max(axis=0))
                progress.advance_rows(len(ids))
    return largest.tolist()


def _write(
    ranges: Sequence[_Range], manifest: Manifest, divisors: np.ndarray | None, out: Path
) -> None:
    writers = {part: PartWriter(out, part, _SHARD_ROWS) for part in PARTS}
    with RowProgress("importing", sum(stop - start for *_, start, stop in ranges)) as progress:
        for part, found, start, stop in ranges:
            for _, block in found.blocks(start, stop):
                ids = block["sparse"] if divisors is None else block["sparse"] % divisors
                arrays = {
                    "numbers": block["dense"].astype(np.float32),
                    "ids": ids.astype(manifest.ids_dtype),
                    "label": block["labels"].astype(np.uint8),
                }
                writers[part].append(arrays, [])
                progress.advance_rows(len(ids))
    parts = {part: writer.finish() for part, writer in writers.items()}
    whole = manifest.model_copy(update={"parts": parts})
    (out / MANIFEST).write_text(whole.model_dump_json(indent=1), encoding="utf-8")
    record_verified(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = _parser().parse_args(arguments)
    return exit_status(lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    import_criteo_npy(given.folder, given.out, sizes=given.sizes, modulo=given.modulo)
    print(prepared_summary(given.out))


def _whole_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stampede.data.criteo_npy",
        description="Make a prepared folder of the files of TorchRec's and MLPerf's Criteo "
        "readers: *_dense.npy, *_sparse.npy, *_labels.npy.",
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="with the .npy files")
    add("out", type=Path, metavar="OUT", help="new folder")
    sizes = "rows of the tables; default: the largest id of each field plus one"
    add("--sizes", type=_whole_numbers, metavar="N[,N...]", help=sizes)
    add("--modulo", action="store_true", help="take ids modulo the sizes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
