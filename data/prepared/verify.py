"""Checks that prepared files are unchanged and that their values are possible."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tqdm.auto import tqdm

from stampede.data.errors import DataError
from stampede.data.prepared.arrays import impossible, map_shard
from stampede.data.prepared.manifest import Manifest, ShardEntry, read_manifest
from stampede.files import (
    MOST_MANIFEST,
    FileEntry,
    check_files,
    difference,
    read_file,
    write_file,
)
from stampede.settings import DAMAGE

# What was verified here; see `_record`.
VERIFIED = "verified.json"

# Times of files are as coarse as the clock of the system.
_TICK = 0.01


def check_unchanged(folder: Path, say: Callable[[str], object]) -> None:
    """Compare the SHA-256 of what was learned, and of shards not yet verified here.

    Verified shards are trusted, as reading a terabyte takes too long. Copies are not, even if they
    kept the times of the files.

    Args:
        say: gets a line if shards must be read.

    Raises:
        DataError: there is no manifest, or a file has changed; names the first.
    """
    manifest = read_manifest(folder)
    check_content(folder, [one for one in manifest.learned if (folder / one.name).exists()])
    # Opening the folder reports missing files.
    states, verified = _states(folder, manifest), _verified(folder)
    suspects = [
        one
        for one in _files(manifest)
        if one.name in states and states[one.name] != verified.get(one.name)
    ]
    if not suspects:
        return
    size = sum(entry.bytes for entry in suspects) / 1e6
    say(f"{folder}: {len(suspects)} files ({size:,.0f} MB) not verified here yet; reading them")
    check_content(folder, suspects)
    if not _record(folder, states):
        say(f"{folder}: {VERIFIED} cannot be written, so they are read before every run")


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
            f"again, or list all changes with: python -m stampede.data.prepare --verify {folder}"
        ) from None


def verify(folder: Path) -> None:
    """Read every file of a prepared folder; compare its length and SHA-256, and check its values.

    If all is well, this is recorded, and `check_unchanged` need not read the files.

    Raises:
        DataError: files are missing, differ, or hold impossible values; names all of them.
    """
    manifest = read_manifest(folder)
    states = _states(folder, manifest)
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
            # The values of a changed file are not worth reporting.
            if shard is not None and not differing:
                differing = impossible_values(folder, manifest, shard)
            wrong += differing
    if wrong:
        count = sum(len(entries) for _, entries in groups)
        raise DataError(
            f"{folder}: {len(wrong)} of {count} files cannot be used; delete the folder to prepare "
            "the data again\n" + "\n".join(f"  {line}" for line in wrong)
        )
    _record(folder, states)


def record_verified(folder: Path) -> None:
    """Record that the files of a folder are as its manifest says; it has just been written."""
    _record(folder, _states(folder, read_manifest(folder)))


def _files(manifest: Manifest) -> list[FileEntry]:
    return [entry for shard in manifest.shards() for entry in shard.files.values()]


def _states(folder: Path, manifest: Manifest) -> dict[str, list[int | str]]:
    """By shard file, what a copy or a change alters, even if it restores the file's times.

    Nobody can choose an inode or the time of a change (ctime), unlike the time of writing (mtime).
    The device is left out: its number may differ after a restart, or on another machine.
    """
    states = {}
    for entry in _files(manifest):
        with suppress(OSError):
            found = (folder / entry.name).stat()
            states[entry.name] = [found.st_ino, found.st_ctime_ns, found.st_size, entry.sha256]
    return states


def _verified(folder: Path) -> dict[str, list[int | str]]:
    """States of the verified files; empty if they are not known."""
    path = folder / VERIFIED
    try:
        before = path.stat().st_ctime_ns
        found = json.loads(read_file(path, MOST_MANIFEST))["files"]
        # A file changed at this time or later may have changed after it was read.
        return {name: state for name, state in found.items() if state[1] < before}
    # If this file is damaged, the shards are read.
    except DAMAGE:
        return {}


def _record(folder: Path, states: Mapping[str, list[int | str]]) -> bool:
    """Write which files were verified, in which state; returns whether this worked."""
    path = folder / VERIFIED
    newest = max((state[1] for state in states.values()), default=0)
    with suppress(OSError):
        # Only files older than the record count as verified.
        for _ in range(3):
            write_file(path, json.dumps({"files": states}, indent=1))
            if path.stat().st_ctime_ns > newest:
                break
            time.sleep(_TICK)
        return True
    return False


def impossible_values(folder: Path, manifest: Manifest, shard: ShardEntry) -> list[str]:
    """The first impossible value of each array of a shard.

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
        reason = next(impossible(manifest, name, array), None)
        if reason is not None:
            found.append(f"{folder / shard.files[name].name}: {reason}")
    return found
