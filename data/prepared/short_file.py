"""Files of a prepared folder that are read whole, wherever the folder comes from."""

from __future__ import annotations

import stat
from pathlib import Path

# Some 400,000 files of shards in a manifest.
_MOST_BYTES = 64 << 20


class NoShortFileError(ValueError):
    """It is no file, or longer than any; the message is what it is."""


def is_file(path: Path) -> bool:
    """Whether it is a file or a link to one; a pipe would be waited for without end.

    Raises:
        OSError: it is absent, or cannot be looked at.
    """
    return stat.S_ISREG(path.stat().st_mode)


def read_short(path: Path) -> bytes:
    """The content of a file of at most 64 MiB.

    Raises:
        OSError: it cannot be read.
        NoShortFileError: it is no file, or longer.
    """
    if not is_file(path):
        raise NoShortFileError("is no file")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise NoShortFileError(f"is longer than {_MOST_BYTES:,} bytes")
    return content
