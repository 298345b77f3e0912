"""Checks a prepared data set against the checksums in its manifest."""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from stampede.data.errors import DataError
from stampede.data.prepared.checksum import sha256
from stampede.data.prepared.manifest import FileEntry, read_manifest


def verify(folder: Path) -> None:
    """Read every file of a prepared folder and compare its length and SHA-256.

    A bar shows how far it has come where it takes more than a second.

    Raises:
        DataError: files are absent or differ; names all of them.
    """
    manifest = read_manifest(folder)
    shards = [shard for part in manifest.parts.values() for shard in part]
    entries = [entry for shard in shards for entry in shard.files.values()]
    entries += manifest.learned
    total = sum(entry.bytes for entry in entries)
    wrong = []
    with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", delay=1) as bar:
        for entry in entries:
            found = _difference(folder / entry.name, entry)
            bar.update(entry.bytes)
            if found:
                wrong.append(f"  {folder / entry.name}: {found}")
    if wrong:
        raise DataError(
            f"{folder}: {len(wrong)} of {len(entries)} files are not as they were written; delete "
            "the folder to prepare the data again\n" + "\n".join(wrong)
        )


def _difference(path: Path, entry: FileEntry) -> str:
    """What is wrong with a file; nothing where it is as described."""
    try:
        length = path.stat().st_size
        if length != entry.bytes:
            return f"{length:,} bytes instead of {entry.bytes:,}"
        if sha256(path) != entry.sha256:
            return "its content has changed (SHA-256 differs)"
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""
