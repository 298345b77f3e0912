"""Lines that are appended to a file as a whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def append_whole(path: Path, content: bytes) -> None:
    """Append to a file, or leave it as it is where the disk is full."""
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            # The first reason is the one to tell.
            with suppress(OSError):
                file.truncate(before)
            raise
