"""Checks prepared data: that files are as they were written, and that their values are possible."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from stampede.data.errors import DataError
from stampede.data.prepared.arrays import map_shard
from stampede.data.prepared.manifest import (
    MANIFEST,
    Manifest,
    ShardEntry,
    ShardFile,
    read_manifest,
)
from stampede.files import FileEntry, check_files, difference, write_file

_PIECE_BYTES = 1 << 24


def check_unchanged(folder: Path, say: Callable[[str], object]) -> None:
    """Compare the SHA-256 of what was learned, and of shards with another time than recorded.

    All other shards are trusted: to read a terabyte takes too long.

    Args:
        say: gets a line where shards have to be read.

    Raises:
        DataError: there is no manifest, or a file has changed; names the first.
    """
    manifest = read_manifest(folder)
    check_content(folder, [one for one in manifest.learned if (folder / one.name).exists()])
    times = _times(folder, manifest)
    suspects = [
        one for one in _files(manifest) if times.get(one.name, one.mtime_ns) != one.mtime_ns
    ]
    if not suspects:
        return
    size = sum(entry.bytes for entry in suspects) / 1e6
    say(
        f"{folder}: {len(suspects)} files ({size:,.0f} MB) were written at another time than "
        f"{MANIFEST} says; reading them. It is told these times by `python -m "
        f"stampede.data.prepare --verify {folder}`"
    )
    check_content(folder, suspects)


def check_content(folder: Path, entries: Sequence[FileEntry]) -> None:
    """Compare length and SHA-256 of files of a prepared folder.

    Raises:
        DataError: one has changed; names the first.
    """
    try:
        check_files(folder, entries)
    except ValueError as failure:
        raise DataError(
            f"{folder}/{failure} since the data were prepared; delete the folder to prepare them "
            f"again, or see what else: python -m stampede.data.prepare --verify {folder}"
        ) from None


def verify(folder: Path) -> None:
    """Read every file of a prepared folder; compare its length and SHA-256, and check its values.

    Where all is well, the manifest gets the times of the files, so that `check_unchanged` need not
    read them.

    Raises:
        DataError: files are absent, differ, or hold what cannot be trained on; names all of them.
    """
    manifest = read_manifest(folder)
    times = _times(folder, manifest)
    groups = [(shard, list(shard.files.values())) for shard in manifest.shards()]
    groups.append((None, manifest.learned))
    total = sum(entry.bytes for _, entries in groups for entry in entries)
    wrong = []
    with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", delay=1) as bar:
        for shard, entries in groups:
            differing = []
            for entry in entries:
                found = difference(folder / entry.name, entry)
                bar.update(entry.bytes)
                if found:
                    differing.append(f"{folder / entry.name}: {found}")
            # The values of a file that has changed need not be told.
            if shard is not None and not differing:
                differing = impossible_values(folder, manifest, shard)
            wrong += differing
    if wrong:
        count = sum(len(entries) for _, entries in groups)
        raise DataError(
            f"{folder}: {len(wrong)} of {count} files cannot be used; delete the folder to prepare "
            "the data again\n" + "\n".join(f"  {line}" for line in wrong)
        )
    _record(folder, manifest, times)


def _files(manifest: Manifest) -> list[ShardFile]:
    return [entry for shard in manifest.shards() for entry in shard.files.values()]


def _times(folder: Path, manifest: Manifest) -> dict[str, int]:
    """When files of shards were last written to, without those that are absent."""
    times = {}
    for entry in _files(manifest):
        with suppress(OSError):
            times[entry.name] = (folder / entry.name).stat().st_mtime_ns
    return times


def _record(folder: Path, manifest: Manifest, times: dict[str, int]) -> None:
    """Write times of files into the manifest, where they differ and it can be written."""
    if all(entry.mtime_ns == times[entry.name] for entry in _files(manifest)):
        return
    values = manifest.model_dump(mode="json")
    for shards in values["parts"].values():
        for entry in (entry for shard in shards for entry in shard["files"].values()):
            entry["mtime_ns"] = times[entry["name"]]
    with suppress(OSError):
        write_file(folder / MANIFEST, json.dumps(values, indent=1))


def impossible_values(folder: Path, manifest: Manifest, shard: ShardEntry) -> list[str]:
    """What is wrong with the values of a shard: of each array its first impossible one.

    Reads the arrays piece by piece. Ids must have a row in their table, labels be 0 or 1, numbers
    and weights finite, weights not negative; offsets must ascend.

    Returns:
        Sentences that begin with the file and name the row, counted from 0.
    """
    try:
        maps = map_shard(folder, manifest, shard, manifest.arrays())
    except DataError as failure:
        return [str(failure)]
    found = []
    for name, array in maps.items():
        reason = next(_impossible(manifest, name, array), None)
        if reason is not None:
            found.append(f"{folder / shard.files[name].name}: {reason}")
    return found


def _impossible(manifest: Manifest, name: str, array: np.ndarray) -> Iterator[str]:
    """The first impossible value of each piece."""
    # Neighbours of offsets are compared.
    overlap = int(name.startswith("offsets_"))
    step = max(_PIECE_BYTES // max(array[:1].nbytes, 1), 1)
    for start in range(0, len(array), step):
        piece = array[start : start + step + overlap]
        wrong = _wrong(manifest, name, piece)
        if wrong is not None and wrong.any():
            row, *column = np.argwhere(wrong)[0].tolist()
            value = piece[(row, *column)]
            yield f"row {start + row}: {_reason(manifest, name, value, column)}"


def _wrong(manifest: Manifest, name: str, piece: np.ndarray) -> np.ndarray | None:
    """Which values of some rows are impossible; None where any is possible."""
    kind, _, number = name.partition("_")
    if kind == "ids":
        return (piece < 0) | (piece >= np.array([entry.rows for entry in manifest.single()]))
    if kind == "values":
        return (piece < 0) | (piece >= manifest.multi()[int(number)].rows)
    if kind == "offsets":
        return piece[1:] < piece[:-1]
    if kind == "label":
        return piece > 1
    if kind == "numbers":
        return ~np.isfinite(piece)
    if kind == "weight":
        return ~(np.isfinite(piece) & (piece >= 0))
    return None


def _reason(manifest: Manifest, name: str, value: np.generic, column: list[int]) -> str:
    kind, _, number = name.partition("_")
    if kind in ("ids", "values"):
        entry = manifest.single()[column[0]] if column else manifest.multi()[int(number)]
        return f"id {value} of field {entry.name!r}, whose table has the rows 0 to {entry.rows - 1}"
    if kind == "offsets":
        return f"{value} is followed by a smaller number"
    if kind == "label":
        return f"the label {value} instead of 0 or 1"
    if kind == "numbers":
        return f"{value} for the number {manifest.numbers[column[0]]!r}"
    return f"the weight {value}; weights are finite and not negative"
