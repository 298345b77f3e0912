"""What runs whose times are watched have left."""

import json
from pathlib import Path


def logged(run: Path, rank: int = 0) -> list[dict]:
    """Lines of a rank's log."""
    return [json.loads(line) for line in (run / f"logs/rank_{rank}.jsonl").read_text().splitlines()]
