"""Checks prepared data: that files are as they were written, and that their values are possible."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tqdm.auto import tqdm

from stampede.data.errors import DataError
from stampede.data.prepared.contents import impossible_values
from stampede.data.prepared.manifest import (
    MANIFEST,
    Manifest,
    ShardFile,
    read_manifest,
)
from stampede.files import FileEntry, check_files, difference, write_file


def check_unchanged(folder: Path, say: Callable[[str], object]) -> None:
    """Compare the SHA-256 of what was learned, and of shards with another time than recorded.

    All others are taken on trust: to read a terabyte would take longer than to notice.

    Args:
        say: is told where shards have to be read.

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

    A bar shows how far it has come where it takes more than a second. Where all is well, the
    manifest gets the times of the files, so that `check_unchanged` need not read them.

    Raises:
        DataError: files are absent, differ, or hold what cannot be trained on; names all of them.
    """
    manifest = read_manifest(folder)
    times = _times(folder, manifest)
    shards = [shard for part in manifest.parts.values() for shard in part]
    groups = [list(shard.files.values()) for shard in shards] + [manifest.learned]
    count = sum(len(entries) for entries in groups)
    total = sum(entry.bytes for entries in groups for entry in entries)
    wrong = []
    with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", delay=1) as bar:
        for shard, entries in zip([*shards, None], groups, strict=True):
            differing = []
            for entry in entries:
                found = difference(folder / entry.name, entry)
                bar.update(entry.bytes)
                if found:
                    differing.append(f"{folder / entry.name}: {found}")
            # Of a file that has changed no value is worth a word.
            if shard is not None and not differing:
                differing = impossible_values(folder, manifest, shard)
            wrong += differing
    if wrong:
        raise DataError(
            f"{folder}: {len(wrong)} of {count} files cannot be used; delete the folder to prepare "
            "the data again\n" + "\n".join(f"  {line}" for line in wrong)
        )
    _record(folder, manifest, times)


def _files(manifest: Manifest) -> list[ShardFile]:
    shards = [shard for part in manifest.parts.values() for shard in part]
    return [entry for shard in shards for entry in shard.files.values()]


def _times(folder: Path, manifest: Manifest) -> dict[str, int]:
    """When files of shards were last written to; absent ones, which opening tells, are left out."""
    times = {}
    for entry in _files(manifest):
        with suppress(OSError):
            times[entry.name] = (folder / entry.name).stat().st_mtime_ns
    return times


def _record(folder: Path, manifest: Manifest, times: dict[str, int]) -> None:
    """Write times of files into the manifest, where they are others and it can be written."""
    if all(entry.mtime_ns == times[entry.name] for entry in _files(manifest)):
        return
    values = manifest.model_dump(mode="json")
    for shards in values["parts"].values():
        for entry in (entry for shard in shards for entry in shard["files"].values()):
            entry["mtime_ns"] = times[entry["name"]]
    with suppress(OSError):
        write_file(folder / MANIFEST, json.dumps(values, indent=1))
