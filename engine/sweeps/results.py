"""What the points of a sweep gave: mean and standard error over their seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stampede.engine.summary import METRICS
from stampede.engine.sweeps.points import Point
from stampede.engine.sweeps.runner import Outcome
from stampede.engine.sweeps.sections import shown_as
from stampede.engine.sweeps.sweep import Sweep


@dataclass(frozen=True)
class Mean:
    """Of the seeds.

    Attributes:
        value: the mean.
        error: its standard error, s/sqrt(n); None for a single seed.
        seeds: n.
    """

    value: float
    error: float | None
    seeds: int


@dataclass(frozen=True)
class Column:
    """A figure of every trial.

    Attributes:
        name: for programs, such as `validation_auc`.
        title: for people, such as `validation AUC`.
        metric: in `summary.json`.
        path: of the section that it stands in there; nothing for the test part in the best epoch.
    """

    name: str
    title: str
    metric: str
    path: tuple[str, ...] = ()

    def of(self, summary: Mapping[str, Any]) -> float | None:
        """Its value; None where the run has none."""
        for section in self.path:
            summary = summary.get(section) or {}
        return summary.get(self.metric)


def columns(metrics: Sequence[str], found: Sequence[Result]) -> list[Column]:
    """Columns of a table: validation beside test in the best epoch, then the last epoch's.

    Args:
        metrics: those of a part, and figures of a whole run.
        found: without any validation part there are no columns for it.
    """
    validated = any("validation" in outcome.summary for one in found for outcome in one.done)
    chosen, last = [], []
    for metric in metrics:
        title = shown_as(metric)
        if metric not in METRICS:
            last.append(Column(metric, title, metric))
            continue
        if validated:
            path = ("validation",)
            chosen.append(Column(f"validation_{metric}", f"validation {title}", metric, path))
        chosen.append(Column(metric, f"test {title}", metric))
        last.append(Column(f"last_{metric}", f"last test {title}", metric, ("last", "test")))
    return chosen + last


@dataclass(frozen=True)
class Result:
    """What a point gave.

    Attributes:
        point: its settings.
        outcomes: of its trials.
        sought: of a study, the metric that it seeks, on the part that selects.
        published: AUC of others at the same point.
    """

    point: Point
    outcomes: Sequence[Outcome]
    sought: Mean | None = None
    published: float | None = None

    @property
    def done(self) -> list[Outcome]:
        """Trials that did not fail."""
        return [outcome for outcome in self.outcomes if not outcome.message]

    def mean(self, column: Column) -> Mean | None:
        """Mean over the trials that did not fail; None where none has such a value."""
        return mean([column.of(outcome.summary) for outcome in self.done])

    @property
    def selected_on(self) -> str:
        """The part or parts that chose the best epochs."""
        return " and ".join(sorted({outcome.selected_on for outcome in self.done}))


def results(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Result]:
    """A result for every point; those of a study begin with the best."""
    by_point: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        point = outcome.trial.point
        by_point.setdefault(point.name or point.title, []).append(outcome)
    found = [_result(sweep, of_point) for of_point in by_point.values()]
    if sweep.study is not None:
        sign = -1 if sweep.study.direction == "maximize" else 1
        # A point that failed in part is not the best of anything.
        found.sort(
            key=lambda one: sign * one.sought.value
            if one.sought and len(one.done) == len(one.outcomes)
            else math.inf
        )
    return found


def mean(values: Sequence[float | None]) -> Mean | None:
    """Of the values that are defined; None without any."""
    defined = [value for value in values if value is not None]
    if not defined:
        return None
    error = statistics.stdev(defined) / math.sqrt(len(defined)) if len(defined) > 1 else None
    return Mean(statistics.fmean(defined), error, len(defined))


def _result(sweep: Sweep, outcomes: list[Outcome]) -> Result:
    done = [outcome for outcome in outcomes if not outcome.message]
    point = outcomes[0].trial.point
    return Result(
        point,
        outcomes,
        mean([outcome.sought(sweep.study.metric) for outcome in done]) if sweep.study else None,
        sweep.published.auc.get(point.title) if sweep.published else None,
    )
