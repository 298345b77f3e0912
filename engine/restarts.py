"""Restarts of a job's processes by torchrun."""

from __future__ import annotations

import os
from pathlib import Path


def launched_by() -> str | None:
    """What the torchrun that started this process is known by; None without torchrun.

    It is the same after torchrun has restarted its processes, and no other torchrun's.
    """
    # torchrun makes a folder of a new name for each time that it is started, and a file's name in
    # it for each start of a process: FOLDER/attempt_1/0/error.json.
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return str(Path(file).parents[2]) if file else None


def restarts() -> tuple[int, int]:
    """How often torchrun has restarted the processes, and how often it may."""
    done = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return int(done), int(allowed)
