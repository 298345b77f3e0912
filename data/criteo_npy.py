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
    read_manifest,
)
from stampede.data.prepared.verify import record_verified
from stampede.data.prepared.writer import PartWriter
from stampede.data.progress import RowProgress
from stampede.files import make_folder

BLOCK_ROWS = 1 << 18
_SHARD_ROWS = 1 << 22

# By array: the widest accepted type, and the type of the layout.
_TYPES = {
    "dense": (np.float64, "float32"),
    "sparse": (np.int64, "int32 or int64"),
    "labels": (np.float64, "int32"),
}

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

# The largest count that a manifest can hold.
_MOST_ROWS = 2**62 - 1


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
    given = _size_per_field(sizes, width)
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
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; write the path of the .npy files")
    paths: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*.npy")):
        named = _NAME.fullmatch(path.name)
        if named is None:
            raise DataError(f"{path}: not a file name of this layout; {_EXPECTED}")
        other = paths.setdefault(named["set"], {}).setdefault(named["array"], path)
        if other != path:
            raise DataError(f"{path}: {other.name} holds the same rows; keep one of the two")
    sets = {name: _open(folder, name, found) for name, found in paths.items()}
    for found in sets.values():
        first = next(iter(sets.values()))
        for array in ("dense", "sparse"):
            columns, expected = (one.arrays[array].shape[1] for one in (found, first))
            if columns != expected:
                raise DataError(
                    f"{found.paths[array]}: found {columns} columns, but {expected} in "
                    f"{first.paths[array].name}; all files need the same columns"
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
    for array, (widest, expected) in _TYPES.items():
        if array not in paths:
            raise DataError(f"{folder}: {name}_{array}.npy is missing; {_EXPECTED}")
        path = paths[array]
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError as failure:
            raise DataError(f"{path}: {failure.strerror or failure}") from None
        except (ValueError, EOFError) as failure:
            raise DataError(
                f"{path}: cannot be read as an array ({failure}); write it with numpy.save"
            ) from None
        if not np.can_cast(found.dtype, widest):
            raise DataError(f"{path}: found type {found.dtype}; write {expected}")
        arrays[array] = found
    labels = arrays["labels"]
    if labels.ndim not in (1, 2) or labels.size != len(labels) or not len(labels):
        raise DataError(f"{paths['labels']}: found the shape {labels.shape}; write [rows, 1]")
    arrays["labels"] = labels.reshape(-1)
    for array in ("dense", "sparse"):
        shape = arrays[array].shape
        if len(shape) != 2 or shape[0] != len(labels):
            raise DataError(
                f"{paths[array]}: found the shape {shape}; write [rows, columns] with the "
                f"{len(labels)} rows of {paths['labels'].name}"
            )
    if not arrays["sparse"].shape[1]:
        raise DataError(f"{paths['sparse']}: has no columns; write one id field or more")
    return _Set(name, paths, arrays)


def _size_per_field(sizes: Sequence[int] | None, fields: int) -> list[int] | None:
    if sizes is None:
        return None
    sizes = list(sizes) * (fields if len(sizes) == 1 else 1)
    if len(sizes) != fields or not 1 <= min(sizes) <= max(sizes) <= _MOST_ROWS:
        raise DataError(
            f"sizes: found {', '.join(map(str, sizes[:30]))}; write one number of 1 or more for "
            f"all fields, or {fields} of them"
        )
    return sizes


def _check(sets: Sequence[_Set], sizes: Sequence[int] | None) -> list[int]:
    """Check all values; returns the largest id of each field."""
    fields = sets[0].arrays["sparse"].shape[1]
    limits = np.array(sizes or [_MOST_ROWS] * fields)
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
    manifest = read_manifest(given.out)
    rows = ", ".join(f"{part} {manifest.rows(part):,}" for part in PARTS)
    tables = sum(entry.rows for entry in manifest.fields)
    print(f"{given.out}: {rows} rows; {len(manifest.fields)} tables of {tables:,} rows together")


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; write a whole number, or one per field, separated by commas"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stampede.data.criteo_npy",
        description="Make a prepared folder of the files of TorchRec's and MLPerf's Criteo "
        "readers: *_dense.npy, *_sparse.npy, *_labels.npy.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with the .npy files")
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="N[,N...]",
        help="rows of the tables; default: the largest id of each field plus one",
    )
    parser.add_argument("--modulo", action="store_true", help="take ids modulo the sizes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
