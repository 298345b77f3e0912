"""What a user sees while a run goes on and at its end."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tqdm.auto import tqdm

from stampede.data.progress import pace


def progress_bar(
    total: int | None,
    done: int,
    enabled: bool,
    what: str = "training",
    unit: str = "samples",
    delay: float = 0.0,
) -> tqdm:
    """A bar over all samples of the run, with ETA and samples/s.

    Args:
        total, done: units in all, None where nobody knows, and those done already.
        enabled: whether anything is shown.
        what: is done.
        unit: what is counted.
        delay: seconds before it appears; one that does is removed at its end.
    """
    return tqdm(
        total=total,
        initial=done,
        unit=f" {unit}",
        unit_scale=True,
        disable=not enabled,
        **pace(),
        desc=what,
        delay=delay,
        leave=not delay,
    )


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns, aligned."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def readable_metric(value: float | None) -> str:
    """Four digits, or `undefined`, as an AUC is where one class is absent."""
    return "undefined" if value is None else f"{value:.4f}"


def readable_bytes(count: float) -> str:
    """For example `1.44 GB` (10^9 bytes), in three digits or more."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.{2 if count < 100 * size else 1}f} {unit}"
    return f"{count:.0f} B"


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
