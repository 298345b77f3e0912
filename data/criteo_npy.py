"""The `.npy` files of TorchRec's and MLPerf's Criteo readers made a prepared folder.

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

from stampede.data.command import exit_status
from stampede.data.errors import DataError
from stampede.data.prepared.manifest import (
    MANIFEST,
    PARTS,
    FieldEntry,
    Manifest,
    PartName,
    ShardEntry,
)
from stampede.data.prepared.shard_writer import shard_file
from stampede.data.progress import RowProgress
from stampede.files import make_folder, sync

BLOCK_ROWS = 1 << 18

# By array: what is accepted, what the layout says, and the array of a prepared folder.
_ARRAYS = {
    "dense": (np.float64, "float32", "numbers"),
    "sparse": (np.int64, "int32 or int64", "ids"),
    "labels": (np.float64, "int32", "label"),
}

# TorchRec's `sparse_to_contiguous` adds the ending; in what it writes all rare ids share row 1.
_CONTIGUOUS = "_contig_freq"
_RARE = 1
_NAME = re.compile(
    rf"(?P<set>train|val|test|day_\d+)_(?P<array>dense|sparse|labels)({_CONTIGUOUS})?\.npy"
)
_PARTS: dict[str, PartName] = {"train": "train", "val": "validation", "test": "test"}
_EXPECTED = (
    "write train_dense.npy, train_sparse.npy and train_labels.npy, the same for val and test, or "
    "day_0_dense.npy and so on, of which the last day is halved into validation and test"
)

# What a manifest can hold.
_MOST_ROWS = 2**62 - 1


@dataclass(frozen=True)
class _Set:
    """Three files of the same rows, memory-mapped, by array; labels flat."""

    name: str
    paths: dict[str, Path]
    arrays: dict[str, np.ndarray]

    @property
    def rows(self) -> int:
        return len(self.arrays["labels"])

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


# A part, and the rows `start` to `stop - 1` of a set that are in it.
_Range = tuple[PartName, _Set, int, int]


def import_criteo_npy(
    folder: Path, out: Path, *, sizes: Sequence[int] | None = None, modulo: bool = False
) -> None:
    """Make a prepared folder of `*_dense.npy`, `*_sparse.npy` and `*_labels.npy`.

    Parts are `train_*`, `val_*` and `test_*`, or days, of which the last is halved into
    validation and test part, as MLPerf does. Memory does not depend on the number of rows.

    Args:
        folder: with the files.
        out: new folder; appears when it is whole.
        sizes: rows of each field's table; one for all, or one per field. None: the largest id and
            one more.
        modulo: whether ids are taken modulo the sizes, as TorchRec's readers do with `hashes`.

    Raises:
        DataError: the files cannot be used, or `out` cannot be written.
    """
    if modulo and sizes is None:
        raise DataError("modulo needs the sizes of the tables; write --sizes")
    if out.exists():
        raise DataError(f"{out}: exists already; choose a new folder")
    ranges = _ranges(folder)
    sets = list({found.name: found for _, found, _, _ in ranges}.values())
    width, numbers = (sets[0].arrays[name].shape[1] for name in ("sparse", "dense"))
    given = _spread(sizes, width)
    largest = _scan(sets, None if modulo else given)
    contiguous = all(found.paths["sparse"].stem.endswith(_CONTIGUOUS) for found in sets)
    rows = given or [top + 1 for top in largest]
    manifest = Manifest(
        version=metadata.version("stampede"),
        fields=[
            FieldEntry(name=f"C{i + 1}", rows=size, unseen_row=_RARE if contiguous else None)
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
        raise DataError(f"{folder}: no such folder; write the one with the .npy files")
    paths: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*.npy")):
        named = _NAME.fullmatch(path.name)
        if named is None:
            raise DataError(f"{path}: its name is none of this layout; {_EXPECTED}")
        of_set = paths.setdefault(named["set"], {})
        if named["array"] in of_set:
            raise DataError(
                f"{path}: {of_set[named['array']].name} holds the same rows; keep one of the two"
            )
        of_set[named["array"]] = path
    sets = [_open(folder, name, found) for name, found in paths.items()]
    for found in sets[1:]:
        _check_same_columns(sets[0], found)
    days = [found for found in sets if found.name.startswith("day_")]
    if days and len(days) == len(sets):
        days.sort(key=lambda day: int(day.name.removeprefix("day_")))
        *training, last = days
        half = last.rows - last.rows // 2
        if training and half < last.rows:
            return [
                *(("train", day, 0, day.rows) for day in training),
                ("validation", last, 0, half),
                ("test", last, half, last.rows),
            ]
    elif not days and {"train", "test"} <= paths.keys():
        return [(_PARTS[found.name], found, 0, found.rows) for found in sets]
    there = ", ".join(f"{name}_*.npy" for name in paths) or "no .npy file"
    raise DataError(f"{folder}: found {there}; {_EXPECTED}")


def _open(folder: Path, name: str, paths: dict[str, Path]) -> _Set:
    arrays = {}
    for array, (widest, expected, _) in _ARRAYS.items():
        if array not in paths:
            raise DataError(f"{folder}: {name}_{array}.npy is absent; {_EXPECTED}")
        path = paths[array]
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError as failure:
            raise DataError(f"{path}: {failure.strerror or failure}") from None
        except (ValueError, EOFError) as failure:
            raise DataError(
                f"{path}: no array that can be read ({failure}); write it with numpy.save"
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
        raise DataError(f"{paths['sparse']}: has no column; need one id field or more")
    return _Set(name, paths, arrays)


def _check_same_columns(first: _Set, other: _Set) -> None:
    for array in ("dense", "sparse"):
        found, expected = other.arrays[array].shape[1], first.arrays[array].shape[1]
        if found != expected:
            raise DataError(
                f"{other.paths[array]}: found {found} columns, but {expected} in "
                f"{first.paths[array].name}; all files need the same columns"
            )


def _spread(sizes: Sequence[int] | None, fields: int) -> list[int] | None:
    if sizes is None:
        return None
    sizes = list(sizes) * (fields if len(sizes) == 1 else 1)
    if len(sizes) != fields or not 1 <= min(sizes) <= max(sizes) <= _MOST_ROWS:
        raise DataError(
            f"sizes: found {', '.join(map(str, sizes[:30]))}; write one number of 1 or more for "
            f"all fields, or {fields} of them"
        )
    return sizes


def _scan(sets: Sequence[_Set], sizes: Sequence[int] | None) -> list[int]:
    """Check all values against what they may be; the largest id of each field."""
    fields = sets[0].arrays["sparse"].shape[1]
    limits = np.array(sizes or [_MOST_ROWS] * fields)
    largest = np.zeros(fields, dtype=np.int64)
    remedy = "write 0 or more, and less than the rows of its table"
    with RowProgress("checking", sum(found.bytes for found in sets)) as progress:
        for found in sets:
            for place, block in _numbered(found, "labels"):
                _refuse(found, "labels", place, (block != 0) & (block != 1), "write 0 or 1")
            for place, block in _numbered(found, "dense"):
                _refuse(found, "dense", place, ~np.isfinite(block), "write finite numbers")
            for place, block in _numbered(found, "sparse"):
                top = block.max(axis=0)
                if block.min() < 0 or (top >= limits).any():
                    _refuse(found, "sparse", place, (block < 0) | (block >= limits), remedy)
                largest = np.maximum(largest, top)
            progress.advance_bytes(found.bytes)
    return largest.tolist()


def _numbered(found: _Set, array: str) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of rows with the number of their first one."""
    for start in range(0, found.rows, BLOCK_ROWS):
        yield start, found.arrays[array][start : start + BLOCK_ROWS]


def _refuse(found: _Set, array: str, place: int, bad: np.ndarray, remedy: str) -> None:
    """Raise for the first bad value of a block whose first row is `place`."""
    if bad.any():
        row, *column = (int(index) for index in np.argwhere(bad)[0])
        value = found.arrays[array][(place + row, *column)]
        where = f"row {place + row}" + "".join(f", column {index}" for index in column)
        raise DataError(f"{found.paths[array]}: {where} (from 0): found {value}; {remedy}")


def _write(
    ranges: Sequence[_Range], manifest: Manifest, divisors: np.ndarray | None, out: Path
) -> None:
    dtypes = {"sparse": manifest.ids_dtype, "dense": "float32", "labels": "uint8"}
    parts: dict[PartName, list[ShardEntry]] = {part: [] for part in PARTS}
    with RowProgress("importing", sum(found.bytes for _, found, _, _ in ranges)) as progress:
        for part, found, start, stop in ranges:
            files = {}
            for array, (_, _, name) in _ARRAYS.items():
                path = out / f"{part}-{len(parts[part]):05d}-{name}.npy"
                values = found.arrays[array][start:stop]
                _copy(values, path, dtypes[array], divisors if array == "sparse" else None)
                files[name] = shard_file(path, out)
            parts[part].append(ShardEntry(rows=stop - start, files=files))
            progress.advance_bytes(found.bytes)
    whole = manifest.model_copy(update={"parts": parts})
    (out / MANIFEST).write_text(whole.model_dump_json(indent=1), encoding="utf-8")


def _copy(array: np.ndarray, path: Path, dtype: str, divisors: np.ndarray | None) -> None:
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": array.shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(array), BLOCK_ROWS):
            block = array[start : start + BLOCK_ROWS]
            block = block if divisors is None else block % divisors
            file.write(np.ascontiguousarray(block, dtype=dtype).data)
    sync(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Import a folder; returns the exit status: 2 for a user's mistake."""
    given = _parser().parse_args(arguments)
    return exit_status(lambda: _import(given))


def _import(given: argparse.Namespace) -> None:
    import_criteo_npy(given.folder, given.out, sizes=given.sizes, modulo=given.modulo)
    manifest = Manifest.model_validate_json((given.out / MANIFEST).read_bytes())
    rows = ", ".join(f"{part} {manifest.rows(part):,}" for part in PARTS)
    tables = sum(entry.rows for entry in manifest.fields)
    print(f"{given.out}: {rows} rows; {len(manifest.fields)} tables of {tables:,} rows together")


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; write a whole number, or one per field with commas between"
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
        help="rows of the tables; default: the largest id of each field and one more",
    )
    parser.add_argument("--modulo", action="store_true", help="take ids modulo the sizes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
