"""Files of a prepared folder that were written to after it was made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stampede.data.errors import DataError
from stampede.data.prepared.checksum import difference
from stampede.data.prepared.manifest import MANIFEST, FileEntry, read_manifest
from stampede.data.threads import run_tasks


def check_unchanged(folder: Path, say: Callable[[str], object]) -> None:
    """Compare the SHA-256 of those files of the folder that are newer than the manifest.

    The manifest is written last, so that there are none unless files were changed or copied. All
    others are taken on trust: to read a terabyte would take longer than to notice. `verify` reads
    everything, and makes the manifest the newest file again.

    Args:
        say: is told where files have to be read.

    Raises:
        DataError: there is no manifest, or a file has changed; names the first.
    """
    manifest = read_manifest(folder)
    entries = [
        entry
        for shards in manifest.parts.values()
        for shard in shards
        for entry in shard.files.values()
    ]
    suspects = newer(folder, [*entries, *manifest.learned])
    if not suspects:
        return
    size = sum(entry.bytes for entry in suspects) / 1e6
    say(f"{folder}: {len(suspects)} files ({size:,.0f} MB) are newer than {MANIFEST}; reading them")
    wrong: dict[str, str] = {}

    def check(entry: FileEntry) -> None:
        found = difference(folder / entry.name, entry)
        if found:
            wrong[entry.name] = found

    run_tasks(check, suspects)
    for name, found in sorted(wrong.items()):
        raise DataError(
            f"{folder / name}: {found} since the data were prepared; delete the folder to prepare "
            f"them again, or see what else: python -m stampede.data.prepare --verify {folder}"
        )


def newer(folder: Path, entries: list[FileEntry]) -> list[FileEntry]:
    """The files that were written to after the manifest; those that are absent are not among them.

    Raises:
        DataError: there is no manifest.
    """
    made = _written(folder / MANIFEST)
    if made is None:
        raise DataError(f"{folder}: no prepared data here ({MANIFEST} is absent)")
    times = ((entry, _written(folder / entry.name)) for entry in entries)
    return [entry for entry, time in times if time is not None and time > made]


def _written(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
