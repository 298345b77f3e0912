"""Checksums of the files of a prepared folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stampede.data.prepared.manifest import FileEntry, ShardFile
from stampede.data.prepared.mapped import size_of


def file_entry(path: Path, folder: Path) -> FileEntry:
    """Name, length and SHA-256 of a file in a prepared folder."""
    name = str(path.relative_to(folder))
    return FileEntry(name=name, bytes=path.stat().st_size, sha256=sha256(path))


def shard_file(path: Path, folder: Path) -> ShardFile:
    """The same and when it was last written to, of a file of a shard that is closed."""
    entry = file_entry(path, folder)
    return ShardFile(**entry.model_dump(), mtime_ns=path.stat().st_mtime_ns)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def difference(path: Path, entry: FileEntry) -> str:
    """What is wrong with a file; empty where it is as described."""
    try:
        length = size_of(path)
        if length != entry.bytes:
            return f"{length:,} bytes instead of {entry.bytes:,}"
        if sha256(path) != entry.sha256:
            return "its content has changed (SHA-256 differs)"
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""
