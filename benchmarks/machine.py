"""The machine of a benchmark, and the load of other processes."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path

# Cores of this process, and threads of every timed process.
CORES = len(os.sched_getaffinity(0))

# Above this share of other processes timings are unreliable.
QUIET = 0.05

# Instructions that decide how fast bf16 is.
_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


def describe_machine() -> dict[str, str | int | list[str]]:
    """Processor, cores, memory, versions and commit."""
    cpu, flags = platform.processor(), set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":")[1].strip()
        elif line.startswith(("flags", "Features")):
            flags = set(line.split(":")[1].split())
            break
    # A copy on another machine may have neither.
    commit = os.environ.get("COMMIT", "")
    if not commit and shutil.which("git"):
        commit = _git("describe", "--always")
        # New results do not affect measurements.
        if _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!README.md"):
            commit += "-dirty"
    # FBGEMM's CPU build has another name.
    named = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy")
    versions = {d.name: d.version for name in named for d in metadata.distributions(name=name)}
    return {
        "cpu": cpu,
        "cores": CORES,
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "bf16_instructions": [flag for flag in _BF16_FLAGS if flag in flags],
        "commit": commit,
        "python": platform.python_version(),
        **versions,
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).resolve().parents[1]), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


class OtherProcesses:
    """Measures the load of other processes since this object was made.

    The time of children counts as ours once they have ended; add that of processes that are not
    children with `mine`.
    """

    def __init__(self) -> None:
        self._start, self._mine = self._now(), 0.0

    def mine(self, seconds: float) -> None:
        """Add processor time of a process that belongs to this benchmark."""
        self._mine += seconds

    def seconds(self) -> tuple[float, float]:
        """Seconds since the start, and the others' processor time on all cores."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return wall, max(busy - own - self._mine, 0.0)

    def share(self, since: tuple[float, float] = (0.0, 0.0)) -> float:
        """Share of all cores' time, 0 to 1, since an earlier result of `seconds`."""
        wall, others = (now - then for now, then in zip(self.seconds(), since, strict=True))
        return max(others, 0.0) / (wall * (os.cpu_count() or 1))

    def _now(self) -> tuple[float, float, float]:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        # user, nice, system, idle, iowait, irq, softirq, steal (proc(5)).
        ticks = sum(map(int, fields[:8])) - sum(map(int, fields[3:5]))
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        own = sum(usage.ru_utime + usage.ru_stime for usage in used)
        return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), own


def memory_of_this_process() -> tuple[int, int]:
    """Resident set and its peak, in bytes; `ru_maxrss` would include the parent's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return tuple(int(values[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
