"""Imports the `.npy` files of TorchRec's and MLPerf's Criteo readers as a prepared folder.

`python benchmarks/peers/criteo_npy.py FOLDER OUT`

A set of samples is three files: `*_dense.npy` float32 `[n, numbers]`, `*_sparse.npy` int32 or int64
`[n, fields]`, `*_labels.npy` int32 `[n, 1]`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from stampede.data.errors import DataError
from stampede.data.exit_status import exit_status
from stampede.data.prepared.manifest import (
    MANIFEST,
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
_CONTIGUOUS, _RARE = "_contig_freq", 1
_NAME = re.compile(
    rf"(?P<set>train|val|test|day_\d+)_(?P<array>dense|sparse|labels)({_CONTIGUOUS})?\.npy"
)
_EXPECTED = (
    "write train_dense.npy, train_sparse.npy and train_labels.npy, the same for val and test, or "
    "day_0_dense.npy and so on; the last day is then halved into validation and test"
)

# Memory-mapped arrays of the same rows, by the names of `_TYPES`; labels are flat.
_Arrays = dict[str, np.memmap]


def import_criteo_npy(
    folder: Path, out: Path, *, sizes: Sequence[int] | None = None, modulo: bool = False
) -> None:
    """Make a prepared folder of `*_dense.npy`, `*_sparse.npy` and `*_labels.npy`.

    The parts are `train_*`, `val_*` and `test_*`, or days, of which the last is halved into
    validation and test, as MLPerf does. Memory does not depend on the number of rows.

    Args:
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
    sets = _open_sets(folder)
    parts = _parts(folder, sets)
    some = next(iter(sets.values()))
    fields, numbers = some["sparse"].shape[1], some["dense"].shape[1]
    if sizes is not None:
        sizes = list(sizes) * (fields if len(sizes) == 1 else 1)
        if len(sizes) != fields or min(sizes) < 1:
            raise DataError(
                f"sizes: found {', '.join(map(str, sizes))}; write one number of 1 or more for all "
                f"fields, or {fields} of them"
            )
    largest = _check(folder, sets, fields, None if modulo else sizes)
    rows = sizes or [id + 1 for id in largest]
    ids_dtype = "int32" if max(rows) <= 2**31 else "int64"
    contiguous = all(_CONTIGUOUS in _path(folder, name, "sparse").name for name in sets)

    def fill(unfinished: Path) -> None:
        writers = {part: PartWriter(unfinished, part, _SHARD_ROWS) for part in parts}
        every = [(part, arrays) for part, some in parts.items() for arrays in some]
        with RowProgress("importing", sum(len(arrays["labels"]) for _, arrays in every)) as bar:
            done = 0
            for part, arrays in every:
                for _, block in _blocks(arrays):
                    ids = block["sparse"] % np.array(rows) if modulo else block["sparse"]
                    columns = {
                        "numbers": block["dense"].astype(np.float32),
                        "ids": ids.astype(ids_dtype),
                        "label": block["labels"].astype(np.uint8),
                    }
                    writers[part].append(columns, [])
                    done += len(ids)
                    bar.advance_to(done, len(ids))
        manifest = Manifest(
            version=metadata.version("stampede"),
            fields=[
                FieldEntry(name=f"C{i}", rows=size, unseen_row=_RARE if rare else None)
                for i, size in enumerate(rows, 1)
                for rare in [contiguous and size > _RARE]
            ],
            numbers=[f"I{i + 1}" for i in range(numbers)],
            ids_dtype=ids_dtype,
            parts={part: writer.finish() for part, writer in writers.items()},
            source={"files": str(folder), "modulo": modulo},
        )
        (unfinished / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        record_verified(unfinished)

    make_folder(out, fill, DataError)


def _open_sets(folder: Path) -> dict[str, _Arrays]:
    """The arrays of a folder by the name of their set, such as `train` or `day_0`."""
    paths: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*.npy")):
        named = _NAME.fullmatch(path.name)
        if named is None:
            raise DataError(f"{path}: not a file name of this layout; {_EXPECTED}")
        other = paths.setdefault(named["set"], {}).setdefault(named["array"], path)
        if other != path:
            raise DataError(f"{path}: {other.name} holds the same rows; keep one of the two")
    sets = {}
    for name, found in paths.items():
        arrays = {}
        for array in _TYPES:
            if array not in found:
                raise DataError(f"{folder}: {name}_{array}.npy is missing; {_EXPECTED}")
            try:
                arrays[array] = np.load(found[array], mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as failure:
                raise DataError(f"{found[array]}: cannot be read as an array ({failure})") from None
        dense, sparse, labels = arrays.values()
        same_rows = len(dense) == len(sparse) == len(labels) == labels.size > 0
        fits = all(np.can_cast(arrays[array].dtype, widest) for array, widest in _TYPES.items())
        if not (same_rows and fits and dense.ndim == sparse.ndim == 2 and sparse.shape[1]):
            shapes = ", ".join(f"{a} {x.dtype} {list(x.shape)}" for a, x in arrays.items())
            raise DataError(
                f"{folder}: {name}_*.npy hold {shapes}; write dense float32 [rows, numbers], "
                "sparse int32 or int64 [rows, fields], labels int32 [rows, 1], all of the same rows"
            )
        sets[name] = arrays | {"labels": labels.reshape(-1)}
    return sets


def _path(folder: Path, name: str, array: str) -> Path:
    return next(folder.glob(f"{name}_{array}*.npy"))


def _parts(folder: Path, sets: dict[str, _Arrays]) -> dict[PartName, list[_Arrays]]:
    widths = sorted({(one["dense"].shape[1], one["sparse"].shape[1]) for one in sets.values()})
    if len(widths) > 1:
        raise DataError(
            f"{folder}: found files with {' and '.join(map(str, widths))} columns of numbers and "
            "ids; all files need the same columns"
        )
    days = sorted((name for name in sets if name.startswith("day_")), key=lambda n: int(n[4:]))
    if {"train", "test"} <= sets.keys() and not days:
        names = {"train": "train", "validation": "val", "test": "test"}
        return {part: [sets[name]] if name in sets else [] for part, name in names.items()}
    if len(days) == len(sets) > 1:
        last = sets[days.pop()]
        half = -(-len(last["labels"]) // 2)
        return {
            "train": [sets[day] for day in days],
            "validation": [{name: array[:half] for name, array in last.items()}],
            "test": [{name: array[half:] for name, array in last.items()}],
        }
    there = ", ".join(f"{name}_*.npy" for name in sets) or "no .npy file"
    raise DataError(f"{folder}: found {there}; {_EXPECTED}")


def _blocks(arrays: _Arrays) -> Iterator[tuple[int, _Arrays]]:
    for first in range(0, len(arrays["labels"]), BLOCK_ROWS):
        yield first, {name: array[first : first + BLOCK_ROWS] for name, array in arrays.items()}


def _check(
    folder: Path, sets: Mapping[str, _Arrays], fields: int, sizes: Sequence[int] | None
) -> list[int]:
    """Check all values; returns the largest id of each field."""
    limits = np.array(sizes or [np.iinfo(np.int64).max] * fields)
    largest = np.zeros(fields, dtype=np.int64)
    for name, arrays in sets.items():
        for start, block in _blocks(arrays):
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
                        f"{_path(folder, name, array)}: {where} (from 0): found "
                        f"{block[array][(row, *column)]}; {remedy}"
                    )
            largest = np.maximum(largest, ids.max(axis=0))
    return largest.tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/peers/criteo_npy.py",
        description="Make a prepared folder of the files of TorchRec's and MLPerf's Criteo "
        "readers: *_dense.npy, *_sparse.npy, *_labels.npy.",
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="with the .npy files")
    add("out", type=Path, metavar="OUT", help="new folder")
    sizes = "rows of the tables; default: the largest id of each field plus one"
    add("--sizes", metavar="N[,N...]", type=_whole_numbers, help=sizes)
    add("--modulo", action="store_true", help="take ids modulo the sizes")
    given = parser.parse_args(arguments)

    def run() -> None:
        import_criteo_npy(given.folder, given.out, sizes=given.sizes, modulo=given.modulo)
        print(prepared_summary(given.out))

    return exit_status(run)


def _whole_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
