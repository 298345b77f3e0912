"""Checksums of the files of a prepared folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stampede.data.prepared.manifest import FileEntry


def file_entry(path: Path, folder: Path) -> FileEntry:
    """Name, length and SHA-256 of a file in a prepared folder."""
    name = str(path.relative_to(folder))
    return FileEntry(name=name, bytes=path.stat().st_size, sha256=sha256(path))


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
