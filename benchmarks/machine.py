"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path


def describe_machine() -> dict[str, str | int]:
    """Processor, cores, versions and commit."""
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":")[1].strip()
            break
    root = Path(__file__).resolve().parents[1]
    commit = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    versions = {name: metadata.version(name) for name in ("torch", "torchrec", "numpy")}
    return {"cpu": cpu, "cores": os.cpu_count() or 0, "commit": commit, **versions}
