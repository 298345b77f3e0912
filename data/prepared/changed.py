"""Files of a prepared folder that were changed after it was made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from stampede.data.errors import DataError
from stampede.data.prepared.checksum import difference
from stampede.data.prepared.manifest import MANIFEST, FileEntry, read_manifest
from stampede.data.prepared.times import shard_files, shard_times, time_made, trust
from stampede.data.threads import run_tasks


def check_unchanged(folder: Path, say: Callable[[str], object]) -> None:
    """Compare the SHA-256 of what was learned, and of the shards that are newer than the manifest.

    The manifest is written last, so that no shard is newer unless it was changed or copied. All
    others are taken on trust: to read a terabyte would take longer than to notice. Where all is
    well the manifest gets the time of the newest shard, so that the next run need not look again;
    `verify` reads everything, and does the same. What was learned is read by every run, and has
    new times whenever a run folder gets or loses its links to it.

    Args:
        say: is told where shards have to be read.

    Raises:
        DataError: there is no manifest, or a file has changed; names the first.
    """
    manifest = read_manifest(folder)
    times = shard_times(folder, manifest)
    learned = [one for one in manifest.learned if os.path.exists(folder / one.name)]
    check_content(folder, learned)
    made = time_made(folder)
    suspects = [entry for entry in shard_files(manifest) if times.get(entry.name, 0) > made]
    if not suspects:
        return
    size = sum(entry.bytes for entry in suspects) / 1e6
    say(f"{folder}: {len(suspects)} files ({size:,.0f} MB) are newer than {MANIFEST}; reading them")
    check_content(folder, suspects)
    trust(folder, times)


def check_content(folder: Path, entries: Sequence[FileEntry]) -> None:
    """Compare length and SHA-256 of files of a prepared folder.

    Raises:
        DataError: one has changed; names the first.
    """
    wrong: dict[str, str] = {}

    def check(entry: FileEntry) -> None:
        found = difference(folder / entry.name, entry)
        if found:
            wrong[entry.name] = found

    run_tasks(check, entries)
    for name, found in sorted(wrong.items()):
        raise DataError(
            f"{folder / name}: {found} since the data were prepared; delete the folder to prepare "
            f"them again, or see what else: stampede prepare --verify {folder}"
        )
