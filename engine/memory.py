"""Main memory that this process may use: the machine's, or less where a cgroup limits it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")


def memory_limit() -> int:
    """Bytes for all processes of this machine, or of this container or job."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _cgroups())])


def free_memory() -> int:
    """Bytes that can be allocated now; what only caches files counts as free."""
    lines = (_ROOT / "proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":") for line in lines)
    available = int(fields["MemAvailable"].split()[0]) << 10
    return max(min([available, *(limit - used for limit, used in _cgroups())]), 0)


def _cgroups() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each memory cgroup that this process is in."""
    try:
        lines = (_ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = _ROOT / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mount = _ROOT / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = mount / path.strip("/")
        # A limit of a group above counts too.
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # no such group in this container, or "max"
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                stat = dict(line.split() for line in (folder / "memory.stat").open())
                files = sum(int(stat[f"{names[2]}{kind}_file"]) for kind in ("active", "inactive"))
                yield limit, used - files
            if folder == mount:
                break
