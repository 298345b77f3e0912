"""Checks a prepared data set: the checksums in its manifest, and that its values are possible."""

from __future__ import annotations

from pathlib import Path

from tqdm.auto import tqdm

from stampede.data.errors import DataError
from stampede.data.prepared.checksum import difference
from stampede.data.prepared.contents import impossible_values
from stampede.data.prepared.manifest import read_manifest
from stampede.data.prepared.times import shard_times, trust


def verify(folder: Path) -> None:
    """Read every file of a prepared folder; compare its length and SHA-256, and check its values.

    A bar shows how far it has come where it takes more than a second. Where all is well, the
    manifest becomes as new as the newest shard, so that training need not look again
    (`check_unchanged`).

    Raises:
        DataError: files are absent, differ, or hold what cannot be trained on; names all of them.
    """
    manifest = read_manifest(folder)
    times = shard_times(folder, manifest)
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
    trust(folder, times)
