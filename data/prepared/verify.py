"""Checks a prepared data set: the checksums in its manifest, and that its values are possible."""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from stampede.data.errors import DataError
from stampede.data.prepared.checksum import sha256
from stampede.data.prepared.contents import impossible_values
from stampede.data.prepared.manifest import FileEntry, read_manifest
from stampede.data.prepared.mapped import size_of


def verify(folder: Path) -> None:
    """Read every file of a prepared folder; compare its length and SHA-256, and check its values.

    A bar shows how far it has come where it takes more than a second.

    Raises:
        DataError: files are absent, differ, or hold what cannot be trained on; names all of them.
    """
    manifest = read_manifest(folder)
    shards = [shard for part in manifest.parts.values() for shard in part]
    groups = [list(shard.files.values()) for shard in shards] + [manifest.learned]
    count = sum(len(entries) for entries in groups)
    total = sum(entry.bytes for entries in groups for entry in entries)
    wrong = []
    with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", delay=1) as bar:
        for shard, entries in zip([*shards, None], groups, strict=True):
            differing = []
            for entry in entries:
                found = _difference(folder / entry.name, entry)
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


def _difference(path: Path, entry: FileEntry) -> str:
    """What is wrong with a file; nothing where it is as described."""
    try:
        length = size_of(path)
        if length != entry.bytes:
            return f"{length:,} bytes instead of {entry.bytes:,}"
        if sha256(path) != entry.sha256:
            return "its content has changed (SHA-256 differs)"
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""
