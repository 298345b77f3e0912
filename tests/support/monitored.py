"""Runs whose times are watched, as ranks of several, and what they left."""

import json
import os
import time
from pathlib import Path

from stampede.engine import step
from stampede.engine.monitor import log_file
from support.jobs import run_small


def logged(run: Path, rank: int = 0) -> list[dict]:
    """Lines of a rank's log."""
    return [json.loads(line) for line in log_file(run, rank).read_text().splitlines()]


def run_with_a_slow_rank(
    folder: Path, overrides: list[str], world_size: int, slow: int, seconds: float
) -> None:
    """A whole run as a rank of several, of which one sleeps in every step."""
    if os.environ["RANK"] == str(slow):
        dense_pass = step._dense_pass

        def slowed(*arguments):
            time.sleep(seconds)
            return dense_pass(*arguments)

        step._dense_pass = slowed
    run_small(folder, overrides, world_size)
