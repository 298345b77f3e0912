"""What a user sees during a run and at its end."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout

from tqdm import tqdm

from stampede.data.progress import bar, quiet


def progress_bar(
    total: int | None,
    done: int,
    enabled: bool,
    what: str = "training",
    unit: str = "samples",
    delay: float = 0.0,
) -> tqdm:
    """A bar with ETA and units per second; in a file, a line after every tenth.

    Args:
        total, done: units in total (None if unknown), and units done before.
        delay: seconds before the bar appears; a delayed bar is removed at its end.
    """
    return bar(
        # In a file, at most a line in ten seconds of what a terminal shows only if it is slow.
        10.0 if delay else 0.0,
        total=total,
        initial=done,
        unit=f" {unit}",
        unit_scale=True,
        disable=not enabled,
        desc=what,
        delay=delay,
        leave=not delay,
    )


@contextmanager
def printing(shown: bool) -> Iterator[None]:
    """Print to the standard output, or nothing, and no progress, meanwhile."""
    if shown:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as silence, redirect_stdout(silence), quiet():
        yield


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns, aligned."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def readable_metric(value: float | None) -> str:
    """Four digits; `undefined` for None, such as an AUC with one class."""
    return "undefined" if value is None else f"{value:.4f}"


def readable_bytes(count: float) -> str:
    """A number of bytes such as `1.44 GB` (10^9 bytes), in three digits or more."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.{2 if count < 100 * size else 1}f} {unit}"
    return f"{count:.0f} B"
