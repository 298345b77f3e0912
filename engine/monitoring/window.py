"""Times of the steps since the last look: of a rank, and of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stampede.engine.monitoring.phases import PHASES, READING, StepTime

_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass(frozen=True)
class Window:
    """What a rank tells the others of some steps, in seconds a step unless said otherwise.

    Attributes:
        steps: how many.
        percentiles: of the steps' seconds: p50, p90, p99, max.
        phases: mean by phase, for each of `PHASES`; their sum is the mean of the steps.
        waited: mean of what it waited for others in collectives, a part of the phases.
        peak_memory_bytes: since the start, in bytes.
    """

    steps: int
    percentiles: dict[str, float]
    phases: dict[str, float]
    waited: float
    peak_memory_bytes: int

    @property
    def mean(self) -> float:
        """Mean of the steps."""
        return sum(self.phases.values())

    @property
    def shares(self) -> dict[str, float]:
        """What part of the time went into waiting for data, and for others in collectives."""
        whole = self.mean or 1.0
        return {
            "data_share": self.phases[READING] / whole,
            "communication_share": self.waited / whole,
        }

    @property
    def own(self) -> float:
        """Mean of what it did not wait for others."""
        return self.mean - self.waited

    def to_vector(self) -> list[float]:
        """As numbers, equally many for every window."""
        return [
            float(self.steps),
            float(self.peak_memory_bytes),
            self.waited,
            *self.percentiles.values(),
            *self.phases.values(),
        ]

    @classmethod
    def from_vector(cls, numbers: Sequence[float]) -> Window:
        """From what `to_vector` gave."""
        steps, memory, waited, *rest = numbers
        cut = len(_PERCENTILES)
        return cls(
            int(steps),
            dict(zip(_PERCENTILES, rest[:cut], strict=True)),
            dict(zip(PHASES, rest[cut:], strict=True)),
            waited,
            int(memory),
        )


def window_of(steps: Sequence[StepTime], peak_memory_bytes: int) -> Window:
    """The window of a rank.

    Args:
        steps: at least one.
    """
    seconds = [step.seconds for step in steps]
    found = np.percentile(seconds, list(_PERCENTILES.values())).tolist()
    count = len(steps)
    return Window(
        count,
        dict(zip(_PERCENTILES, found, strict=True)),
        {name: sum(step.phases.get(name, 0.0) for step in steps) / count for name in PHASES},
        sum(step.waited for step in steps) / count,
        peak_memory_bytes,
    )


def together(windows: Sequence[Window]) -> dict[str, Any]:
    """Fields of a line of `metrics.jsonl`, from the windows of all ranks.

    The names of all end as those of other times do, since no two runs have the same.

    Returns:
        `step_seconds`: percentiles, the largest of any rank, the mean, and of how many steps they
        are; `phase_seconds` and `communication_seconds`: means over the ranks; `slowest_seconds`:
        the rank that waited least for others, what it took itself and what the others did in the
        mean, None where there are none; `peak_memory_bytes`: the largest of any rank.
    """
    count = len(windows)
    phases = {name: sum(w.phases[name] for w in windows) / count for name in PHASES}
    largest = {name: max(w.percentiles[name] for w in windows) for name in _PERCENTILES}
    own = [window.own for window in windows]
    slowest = own.index(max(own))
    others = own[:slowest] + own[slowest + 1 :]
    return {
        "step_seconds": {
            **largest,
            "mean": sum(phases.values()),
            "steps": windows[0].steps,
        },
        "phase_seconds": phases,
        "communication_seconds": sum(window.waited for window in windows) / count,
        "slowest_seconds": {
            "rank": slowest,
            "own": own[slowest],
            "others": sum(others) / len(others) if others else None,
        },
        "peak_memory_bytes": max(window.peak_memory_bytes for window in windows),
    }
