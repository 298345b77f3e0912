"""Files of a prepared folder: compared with the manifest, and memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from stampede.data.errors import DataError
from stampede.data.prepared.manifest import Manifest, ShardEntry, read_manifest
from stampede.files import (
    MOST_MANIFEST,
    FileEntry,
    check_files,
    difference,
    read_json,
    write_file,
)
from stampede.settings import DAMAGE

# The states of the files that were verified here; see `_states`.
VERIFIED = "verified.json"


def map_shard(folder: Path, shard: ShardEntry, names: Iterable[str]) -> dict[str, np.memmap]:
    """Map some arrays of a shard without reading them. Raises a `DataError` if one is damaged."""
    maps = {}
    for name in names:
        entry = shard.files[name]
        path = folder / entry.name
        what = difference(path, entry, content=False)
        if what:
            raise damaged(path, what)
        try:
            maps[name] = np.lib.format.open_memmap(path, mode="r")
        # numpy hands the header to Python's parser, which may raise any exception.
        except Exception as failure:
            raise damaged(path, f"cannot be mapped ({failure})") from None
    return maps


def damaged(path: Path, what: str) -> DataError:
    """The error for a file of a prepared folder that cannot be used."""
    return DataError(
        f"{path}: {what}; delete the folder to prepare the data again, or list all damage with: "
        f"stampede prepare --verify {path.parent}"
    )


def check_unchanged(folder: Path, say: Callable[[str], object]) -> None:
    """Compare the SHA-256 of what was learned, and of shards not yet verified here.

    Verified shards are trusted, as reading a terabyte takes too long. Copies are not, even if they
    kept the times of the files. `say` gets a line if shards must be read.

    Raises:
        DataError: there is no manifest, or a file has changed; names the first.
    """
    manifest = read_manifest(folder)
    check_content(folder, [one for one in manifest.learned if (folder / one.name).exists()])
    states, verified = _states(folder, manifest), {}
    with suppress(*DAMAGE):
        verified = dict(read_json(folder / VERIFIED, MOST_MANIFEST)["files"])
    # Opening the folder reports missing files.
    changed = {name for name, state in states.items() if state != verified.get(name)}
    if not changed:
        return
    suspects = [entry for entry in _files(manifest) if entry.name in changed]
    size = sum(entry.bytes for entry in suspects) / 1e6
    say(f"{folder}: {len(suspects)} files ({size:,.0f} MB) not verified here yet; reading them")
    check_content(folder, suspects)
    if not _record(folder, states):
        say(f"{folder}: {VERIFIED} cannot be written, so they are read before every run")


def check_content(folder: Path, entries: Sequence[FileEntry]) -> None:
    """Compare length and SHA-256 of files. Raises a `DataError` at the first that differs."""
    try:
        check_files(folder, entries)
    except ValueError as failure:
        raise DataError(
            f"{folder}/{failure} since the data were prepared; delete the folder to prepare them "
            f"again, or list all changes with: stampede prepare --verify {folder}"
        ) from None


def verify(folder: Path) -> None:
    """Read every file of a prepared folder and record that it is as the manifest says.

    Raises:
        DataError: files are missing or differ; names all of them.
    """
    manifest = read_manifest(folder)
    states = _states(folder, manifest)
    entries, wrong = [*_files(manifest), *manifest.learned], []
    total = sum(entry.bytes for entry in entries)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="verifying", delay=1, disable=None
    ) as bar:
        for entry in entries:
            found = difference(folder / entry.name, entry)
            bar.update(entry.bytes)
            if found:
                wrong.append(f"\n  {folder / entry.name}: {found}")
    if wrong:
        raise DataError(
            f"{folder}: {len(wrong)} of {len(entries)} files cannot be used; delete the folder to "
            f"prepare the data again{''.join(wrong)}"
        )
    _record(folder, states)


def record_verified(folder: Path) -> None:
    """Record that the files of a folder are as its manifest says; it has just been written."""
    _record(folder, _states(folder, read_manifest(folder)))


def _files(manifest: Manifest) -> list[FileEntry]:
    return [entry for shard in manifest.shards() for entry in shard.files.values()]


def _states(folder: Path, manifest: Manifest) -> dict[str, list[int | str]]:
    """By shard file, what a copy or a change alters: inode and time of change (ctime).

    The device is left out: its number may differ after a restart, or on another machine.
    """
    states = {}
    for entry in _files(manifest):
        with suppress(OSError):
            found = (folder / entry.name).stat()
            states[entry.name] = [found.st_ino, found.st_ctime_ns, found.st_size, entry.sha256]
    return states


def _record(folder: Path, states: Mapping[str, list[int | str]]) -> bool:
    """Write which files were verified, in which state; returns whether this worked."""
    try:
        write_file(folder / VERIFIED, json.dumps({"files": states}, indent=1))
    except OSError:
        return False
    return True
