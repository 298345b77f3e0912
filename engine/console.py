"""What a user sees during a run and at its end."""

from __future__ import annotations

from collections.abc import Iterable

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
    """A bar with ETA and units per second.

    Args:
        total, done: units in total (None if unknown), and units done before.
        delay: seconds before the bar appears; a delayed bar is removed at its end.
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
    """Four digits; `undefined` for None, such as an AUC with one class."""
    return "undefined" if value is None else f"{value:.4f}"


def readable_bytes(count: float) -> str:
    """A number of bytes such as `1.44 GB` (10^9 bytes), in three digits or more."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.{2 if count < 100 * size else 1}f} {unit}"
    return f"{count:.0f} B"
