"""The points of a grid, and their trials."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stampede.engine.sweeps.sections import Grid


@dataclass(frozen=True)
class Point:
    """Settings that are tried, with one seed or several.

    Attributes:
        labels: by axis, the value or its name.
        overrides: `section.key=value` each.
        name: for files; empty for what its labels make.
    """

    labels: Mapping[str, str]
    overrides: tuple[str, ...]
    name: str = ""

    @property
    def title(self) -> str:
        """Its labels, as in `deepfm / 1K`."""
        return " / ".join(self.labels.values())

    def trial(self, seed: int) -> Trial:
        """Its run with a seed."""
        parts = [self.name] if self.name else [_plain(text) for text in self.labels.values()]
        return Trial(self, seed, "-".join([*parts, f"seed{seed}"]).lstrip("_-"))


@dataclass(frozen=True)
class Trial:
    """A run.

    Attributes:
        point: its settings.
        seed: `run.seed`.
        name: of the run folder.
    """

    point: Point
    seed: int
    name: str


def grid_points(grid: Grid) -> list[Point]:
    """Every combination of the axes' values, the last axis fastest."""
    axes = [[(axis, *choice) for choice in _choices(axis, grid[axis])] for axis in grid]
    return [
        Point(
            {axis: label for axis, label, _ in chosen},
            tuple(override for _, _, overrides in chosen for override in overrides),
        )
        for chosen in itertools.product(*axes)
    ]


def override(key: str, value: Any) -> str:
    """`section.key=value`; JSON is YAML."""
    return f"{key}={json.dumps(value)}"


def label(value: Any) -> str:
    """A value as tables show it."""
    return value if isinstance(value, str) else json.dumps(value)


def keys_by_axis(grid: Grid) -> dict[str, set[str]]:
    """Keys of the configuration that each axis sets."""
    return {
        axis: {
            text.partition("=")[0] for _, overrides in _choices(axis, values) for text in overrides
        }
        for axis, values in grid.items()
    }


def values_of(point: Point) -> list[Any]:
    """The values that a point gives its keys, in full."""
    return [json.loads(text.partition("=")[2]) for text in point.overrides]


def _choices(axis: str, values: Any) -> list[tuple[str, list[str]]]:
    if isinstance(values, dict):
        return list(values.items())
    return [(label(value), [override(axis, value)]) for value in values]


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.") or "empty"
