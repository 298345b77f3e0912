"""A folder in the layout of TorchRec's Criteo readers made a prepared folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from stampede.data.errors import DataError
from stampede.data.npy_layout.arrays import BLOCK_ROWS, blocks, write_array
from stampede.data.npy_layout.exporting import LAYOUT
from stampede.data.npy_layout.groups import CONTIGUOUS, Group, Range, find_ranges
from stampede.data.prepared.checksum import file_entry
from stampede.data.prepared.manifest import (
    MANIFEST,
    PARTS,
    FieldEntry,
    Manifest,
    PartName,
    ShardEntry,
)
from stampede.data.prepared.whole_folder import make_whole
from stampede.data.progress import RowProgress
from stampede.settings import Section

# Row of rare ids in the arrays that `BinaryCriteoUtils.sparse_to_contiguous` writes.
_RARE = 1

# What a manifest can hold.
_MOST_ROWS = 2**62 - 1


class _Layout(Section):
    """`layout.json`, which `export` writes."""

    fields: list[FieldEntry]
    numbers: list[str]
    rows: dict[str, int]


def import_npy(
    folder: Path,
    out: Path,
    *,
    sizes: Sequence[int] | None = None,
    modulo: bool = False,
    link: bool = False,
) -> None:
    """Make a prepared folder of `*_dense.npy`, `*_sparse.npy` and `*_labels.npy`.

    Parts are `train_*`, `val_*` and `test_*`, or days, of which the last is halved into
    validation and test part. Names of fields and numbers are those of `layout.json` where the
    folder has one, else I1, I2, ... and C1, C2, ... Memory does not depend on the number of rows.

    Args:
        folder: with the files.
        out: new folder; appears when it is whole.
        sizes: rows of each field's table; one for all, or one per field. None: as `layout.json`
            says, else the largest id and one more.
        modulo: whether ids are taken modulo the sizes, as TorchRec's readers do with `hashes`.
        link: whether arrays that need no change are hard links to the files, not copies. Files
            must then not be changed in place.

    Raises:
        DataError: the files cannot be used, or `out` cannot be written.
    """
    if modulo and sizes is None:
        raise DataError("modulo needs the sizes of the tables; write --sizes")
    if out.exists():
        raise DataError(f"{out}: exists already; choose a new folder")
    ranges = find_ranges(folder)
    groups = list({found.group.name: found.group for found in ranges}.values())
    layout = _read_layout(folder)
    width, numbers = (groups[0].arrays[name].shape[1] for name in ("sparse", "dense"))
    if layout is not None and (len(layout.fields), len(layout.numbers)) != (width, numbers):
        raise DataError(
            f"{folder / LAYOUT}: has {len(layout.fields)} fields and {len(layout.numbers)} "
            f"numbers, but the arrays {width} and {numbers}; remove it"
        )
    if sizes is None and layout is not None:
        sizes = [entry.rows for entry in layout.fields]
    sizes = _spread(sizes, width)
    found = _scan(groups, None if modulo else sizes)
    fields = _fields(layout, sizes or found, groups)
    manifest = Manifest(
        version=metadata.version("stampede"),
        fields=fields,
        numbers=layout.numbers if layout else [f"I{i + 1}" for i in range(numbers)],
        ids_dtype="int32" if max(entry.rows for entry in fields) <= 2**31 else "int64",
        parts={},
        source={"files": str(folder), "modulo": modulo},
    )
    divisors = np.array(sizes) if modulo else None
    make_whole(out, lambda unfinished: _write(ranges, manifest, divisors, link, unfinished))


def _read_layout(folder: Path) -> _Layout | None:
    path = folder / LAYOUT
    try:
        return _Layout.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as failure:
        raise DataError(f"{path}: {failure.strerror or failure}") from None
    except ValidationError as failure:
        reason = failure.errors(include_url=False)[0]["msg"]
        raise DataError(f"{path}: damaged ({reason}); remove it, or export again") from None


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


def _fields(
    layout: _Layout | None, sizes: Sequence[int], groups: Sequence[Group]
) -> list[FieldEntry]:
    if layout is not None:
        return [
            entry.model_copy(update={"rows": size})
            for entry, size in zip(layout.fields, sizes, strict=True)
        ]
    contiguous = all(group.paths["sparse"].stem.endswith(CONTIGUOUS) for group in groups)
    return [
        FieldEntry(
            name=f"C{i + 1}",
            rows=size,
            unseen_row=_RARE if contiguous else None,
        )
        for i, size in enumerate(sizes)
    ]


def _scan(groups: Sequence[Group], sizes: Sequence[int] | None) -> list[int]:
    """Check all values against what they may be; largest id of each field and one more."""
    fields = groups[0].arrays["sparse"].shape[1]
    limits = np.array(sizes or [_MOST_ROWS] * fields)
    largest = np.zeros(fields, dtype=np.int64)
    remedy = "write 0 or more, and less than the rows of its table"
    with RowProgress("checking", sum(map(_bytes, groups))) as progress:
        for group in groups:
            for place, block in _numbered(group, "labels"):
                _refuse(group, "labels", place, (block != 0) & (block != 1), "write 0 or 1")
            for place, block in _numbered(group, "dense"):
                _refuse(group, "dense", place, ~np.isfinite(block), "write finite numbers")
            for place, block in _numbered(group, "sparse"):
                top = block.max(axis=0)
                if block.min() < 0 or (top >= limits).any():
                    _refuse(group, "sparse", place, (block < 0) | (block >= limits), remedy)
                largest = np.maximum(largest, top)
            progress.advance_bytes(_bytes(group))
    return [int(top) + 1 for top in largest]


def _numbered(group: Group, name: str) -> Iterator[tuple[int, np.ndarray]]:
    for number, block in enumerate(blocks(group.arrays[name])):
        yield number * BLOCK_ROWS, block


def _refuse(group: Group, name: str, place: int, bad: np.ndarray, remedy: str) -> None:
    """Raise for the first bad value of a block whose first row is `place`."""
    if bad.any():
        row, *column = (int(index) for index in np.argwhere(bad)[0])
        found = group.arrays[name][(place + row, *column)]
        where = f"row {place + row}" + "".join(f", column {index}" for index in column)
        raise DataError(f"{group.paths[name]}: {where} (from 0): found {found}; {remedy}")


def _bytes(group: Group) -> int:
    return sum(array.nbytes for array in group.arrays.values())


def _write(
    ranges: Sequence[Range],
    manifest: Manifest,
    divisors: np.ndarray | None,
    link: bool,
    out: Path,
) -> None:
    parts: dict[PartName, list[ShardEntry]] = {part: [] for part in PARTS}
    with RowProgress("importing", sum(_bytes(found.group) for found in ranges)) as progress:
        for found in ranges:
            shards = parts[found.part]
            stem = f"{found.part}-{len(shards):05d}"
            files = {
                "ids": _copy(found, "sparse", out / f"{stem}-ids.npy", manifest, divisors, link),
                "numbers": _copy(found, "dense", out / f"{stem}-numbers.npy", manifest, None, link),
                "label": _copy(found, "labels", out / f"{stem}-label.npy", manifest, None, False),
            }
            entries = {name: file_entry(path, out) for name, path in files.items()}
            shards.append(ShardEntry(rows=found.stop - found.start, files=entries))
            progress.advance_bytes(_bytes(found.group))
    whole = manifest.model_copy(update={"parts": parts})
    (out / MANIFEST).write_text(whole.model_dump_json(indent=1), encoding="utf-8")


def _copy(
    found: Range,
    name: str,
    path: Path,
    manifest: Manifest,
    divisors: np.ndarray | None,
    link: bool,
) -> Path:
    """Write a range of an array, or link it where nothing has to change."""
    array = found.group.arrays[name]
    dtype = {"sparse": manifest.ids_dtype, "dense": "float32", "labels": "uint8"}[name]
    whole = found.stop - found.start == len(array)
    same = array.dtype == np.dtype(dtype) and array.flags.c_contiguous
    if link and whole and same and divisors is None:
        # Another file system, or one without links.
        with suppress(OSError):
            os.link(found.group.paths[name], path)
            return path
    rows: Iterator[np.ndarray] = blocks(array, found.start, found.stop)
    if divisors is not None:
        rows = (block % divisors for block in rows)
    write_array(path, rows, (found.stop - found.start, *array.shape[1:]), dtype)
    return path
