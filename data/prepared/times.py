"""When the shards of a prepared folder were changed, and when its manifest was written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from stampede.data.prepared.manifest import MANIFEST, FileEntry, Manifest

# The clocks of machines that share a disk differ by less, in nanoseconds.
_MOST_SKEW = 60 * 10**9


def shard_times(folder: Path, manifest: Manifest) -> dict[str, int]:
    """When each file of a shard was last changed, in nanoseconds; absent ones are left out.

    The later of two times: that of its content, which `cp -p`, rsync and tar set to an earlier one,
    and that of its inode, which nobody can set.
    """
    found = {}
    for entry in shard_files(manifest):
        with suppress(OSError):
            status = (folder / entry.name).stat()
            found[entry.name] = max(status.st_mtime_ns, status.st_ctime_ns)
    return found


def trust(folder: Path, times: dict[str, int]) -> None:
    """Let the manifest be as new as the newest shard.

    Args:
        times: what `shard_times` said before all that is newer was read and found whole.
    """
    if not times:
        return
    # One to come would hide what is changed until then.
    newest = min(max(times.values()), time.time_ns())
    # In a folder that cannot be written they are read again.
    with suppress(OSError):
        os.utime(folder / MANIFEST, ns=(newest, newest))


def time_made(folder: Path) -> int:
    """When the manifest was written.

    0 where that is yet to come, as after a clock was put back: what is older may then be newer.
    """
    made = (folder / MANIFEST).stat().st_mtime_ns
    return made if made <= time.time_ns() + _MOST_SKEW else 0


def shard_files(manifest: Manifest) -> Iterable[FileEntry]:
    """All files of all shards."""
    for shards in manifest.parts.values():
        for shard in shards:
            yield from shard.files.values()
