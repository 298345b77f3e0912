"""What is said of a record of a run that cannot be written: no run ends for it."""

from __future__ import annotations

import sys
from pathlib import Path


def say_given_up(rank: int, path: Path, what: str, failure: BaseException | None) -> None:
    """Tell that training goes on without it.

    Args:
        rank: whose record it is.
        path: of the record.
        what: it is, such as `trace`.
        failure: why it cannot be written.
    """
    why = getattr(failure, "strerror", None) or failure
    print(
        f"rank {rank}: {path}: the {what} cannot be written ({why}); training goes on without it",
        file=sys.stderr,
        flush=True,
    )
