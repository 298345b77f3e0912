"""What the points of a sweep gave: mean and standard error over their seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stampede.engine.sweeps.points import Point
from stampede.engine.sweeps.runner import Outcome
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
class Result:
    """What a point gave.

    Attributes:
        point: its settings.
        outcomes: of its trials.
        means: by metric, of the trials that did not fail; None where none has it.
        sought: of a study, the metric that it seeks, on the part that selects.
        published: AUC of others at the same point.
    """

    point: Point
    outcomes: Sequence[Outcome]
    means: dict[str, Mean | None]
    sought: Mean | None = None
    published: float | None = None

    @property
    def done(self) -> list[Outcome]:
        """Trials that did not fail."""
        return [outcome for outcome in self.outcomes if not outcome.message]

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
        {
            metric: mean([outcome.metrics.get(metric) for outcome in done])
            for metric in sweep.section.report.metrics
        },
        mean([outcome.selected[sweep.study.metric] for outcome in done]) if sweep.study else None,
        sweep.published.auc.get(point.title) if sweep.published else None,
    )
