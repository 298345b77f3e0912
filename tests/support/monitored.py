"""What runs whose times are watched have left."""

import json
from pathlib import Path

from stampede.engine.monitor import log_file


def logged(run: Path, rank: int = 0) -> list[dict]:
    """Lines of a rank's log."""
    return [json.loads(line) for line in log_file(run, rank).read_text().splitlines()]
