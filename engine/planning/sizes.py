"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from stampede.settings import SettingsError

_UNITS = {"B": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("KMGT", 1)
    for kind, base in (("B", 10**3), ("iB", 2**10))
}
_BY_LOWER_CASE = {unit.lower(): size for unit, size in _UNITS.items()}


def parse_bytes(text: str, option: str) -> int:
    """Bytes of `141GB` (10^9 each), `80GiB` (2^30 each), `512MB` and the like.

    Args:
        option: of the command line that it was given with.

    Raises:
        SettingsError: it is no size, or none above 0.
    """
    parts = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*", text)
    unit = _BY_LOWER_CASE.get(parts[2].lower()) if parts else None
    size = round(float(parts[1]) * unit) if unit else 0
    if size < 1:
        raise SettingsError(
            f"{option}: found {text!r}; write a number above 0 and a unit, such as 141GB (10^9 "
            f"bytes) or 80GiB (2^30 bytes); units are {', '.join(_UNITS)}"
        )
    return size


def readable(count: float) -> str:
    """For example `1.44 TB` (10^12 bytes), three digits or more."""
    for unit in ("TB", "GB", "MB", "KB"):
        if count >= 0.9995 * _UNITS[unit]:
            value = count / _UNITS[unit]
            return f"{value:.{2 if value < 100 else 1}f} {unit}"
    return f"{count:.0f} B"
