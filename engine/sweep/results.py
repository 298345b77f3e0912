"""Mean and standard error over the seeds of each point: CSV for programs, Markdown for people."""

from __future__ import annotations

import csv
import io
import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stampede.engine.config import Config
from stampede.engine.summary import METRICS, selected_metrics
from stampede.engine.sweep.spec import Point, Sweep, Trial, shown_as

_WIDTH = 100
# Digits after the point; 4 where none is given.
_DIGITS = {"train_seconds": 1, "best_epoch": 1, "steps": 0, "samples_per_second": 0}
_HOW = {
    "validation": "the epoch that was best on the validation part",
    "test": "the best epoch, chosen on the test part itself (evaluate.select_on=test): optimistic",
}


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes:
        trial: which one.
        summary: its `summary.json`; empty where it failed.
        message: why it failed; empty where it did not.
    """

    trial: Trial
    summary: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    @property
    def selected_on(self) -> str:
        """The part that chose the best epoch; empty where the trial failed."""
        return self.summary.get("selected_on", "")

    def sought(self, metric: str) -> float | None:
        """A metric of that part in that epoch."""
        return selected_metrics(self.summary)[self.selected_on].get(metric)


@dataclass(frozen=True)
class Mean:
    """Mean over the seeds, and its standard error s/sqrt(n); None for a single seed."""

    value: float
    error: float | None


def mean(values: Iterable[float | None]) -> Mean | None:
    """Of the values that are defined; None without any."""
    defined = [value for value in values if value is not None]
    if not defined:
        return None
    error = statistics.stdev(defined) / math.sqrt(len(defined)) if len(defined) > 1 else None
    return Mean(statistics.fmean(defined), error)


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

    @property
    def failed(self) -> int:
        """Number of trials that failed."""
        return len(self.outcomes) - len(self.done)

    def mean(self, column: Column) -> Mean | None:
        """Mean over the trials that did not fail; None where none has such a value."""
        return mean(column.of(outcome.summary) for outcome in self.done)

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
    published = sweep.section.published.auc if sweep.section.published else {}
    found = []
    for of_point in by_point.values():
        point, sought = of_point[0].trial.point, None
        if sweep.study:
            sought = mean(one.sought(sweep.study.metric) for one in of_point if not one.message)
        found.append(Result(point, of_point, sought, published.get(point.title)))
    if sweep.study:
        sign = -1 if sweep.study.direction == "maximize" else 1
        # A point that failed in part is not the best of anything.
        found.sort(
            key=lambda one: sign * one.sought.value if one.sought and not one.failed else math.inf
        )
    return found


def columns(metrics: Iterable[str], found: Sequence[Result]) -> list[Column]:
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


def axes_of(found: Sequence[Result]) -> list[str]:
    """What the points differ in."""
    return list(found[0].point.labels) if found else []


def to_csv(sweep: Sweep, found: Sequence[Result]) -> str:
    """A line for every point, numbers in full."""

    def cells(of: Mean | None) -> list[float | None]:
        return [None, None] if of is None else [of.value, of.error]

    # All metrics that were computed, whatever the Markdown shows.
    computed = [m for m in METRICS if any(m in o.summary for one in found for o in one.done)]
    shown = columns(dict.fromkeys([*sweep.section.report.metrics, *computed]), found)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    sought = [f"{sweep.study.metric}_sought", "sought_stderr"] if sweep.study else []
    measured = [f"{column.name}_{which}" for column in shown for which in ("mean", "stderr")]
    published = ["auc_published"] if sweep.section.published else []
    writer.writerow(
        [*axes_of(found), *sought, *measured, "seeds", "failed", "selected_on", *published]
    )
    for one in found:
        # Labels of a study are rounded.
        row = one.point.values if sweep.study else list(one.point.labels.values())
        row += cells(one.sought) if sweep.study else []
        for column in shown:
            row += cells(one.mean(column))
        row += [len(one.done), one.failed, one.selected_on]
        writer.writerow([*row, *([one.published] if published else [])])
    return text.getvalue()


def to_markdown(sweep: Sweep, found: Sequence[Result]) -> str:
    """The table, how its figures were chosen, and what failed."""
    section = sweep.section
    cells = {axis: [one.point.labels[axis] for one in found] for axis in axes_of(found)}
    if sweep.study:
        metric = sweep.study.metric
        cells[f"{shown_as(metric)}, selecting part"] = [_shown(one.sought, metric) for one in found]
    for column in columns(section.report.metrics, found):
        cells[column.title] = [_shown(one.mean(column), column.metric) for one in found]
    cells["seeds"] = [f"{len(o.done)}, {o.failed} failed" if o.failed else str(len(o.done))
                      for o in found]  # fmt: skip
    parts = sorted({one.selected_on for one in found if one.done})
    if len(parts) > 1:
        cells["selected on"] = [one.selected_on for one in found]
    if section.published:
        shown = ["" if one.published is None else f"{one.published:.4f}" for one in found]
        cells["published test AUC"] = shown
    chosen = "; ".join(_HOW.get(part, part) for part in parts) or "no trial was finished"
    several = ", mean ± standard error over the seeds" if len(section.seeds) > 1 else ""
    how = f"Figures at {chosen}{several}; `last`: after the last epoch, for comparison."
    said = [_data(sweep, found), _wrapped(how), _aligned(cells)]
    if section.published:
        said.append(_wrapped(f"Published AUC: {section.published.source}."))
    failed = [outcome for one in found for outcome in one.outcomes if outcome.message]
    if failed:
        lines = [_wrapped(f"- `{one.trial.name}`: {one.message}") for one in failed]
        again = "" if sweep.study else " (`--retry-failed` runs them again)"
        said.append(f"Failed{again}:\n\n" + "\n".join(lines))
    return "\n\n".join([f"# {sweep.folder.name}", *filter(None, said)]) + "\n"


def _data(sweep: Sweep, found: Sequence[Result]) -> str:
    """What data the figures are of; empty where no trial was finished."""
    done = [outcome for one in found for outcome in one.done]
    if not done:
        return ""
    # Seeds change no data.
    firsts = [one.done[0].trial for one in found if one.done]
    data = _alternatives(_described(sweep.config_of(trial)) for trial in firsts)
    rows = _alternatives(f"{outcome.summary['rows']['train']:,}" for outcome in done)
    tested = _alternatives(f"{outcome.summary['rows']['test']:,}" for outcome in done)
    parts = _alternatives(outcome.selected_on for outcome in done)
    return _wrapped(
        f"Data: {data}; {rows} training rows, {tested} test rows; selected on the {parts} part."
    )


def _described(config: Config) -> str:
    path, split = getattr(config.data, "path", ""), getattr(config.data, "split", "")
    paths = [path] if isinstance(path, str) else path
    return ", ".join(filter(None, [config.data.kind, *paths, f"split {split}" if split else ""]))


def _alternatives(texts: Iterable[str]) -> str:
    """Up to three different ones, and how many more there are."""
    different = list(dict.fromkeys(texts))
    more = [f"{len(different) - 3} more"] if len(different) > 3 else []
    return " or ".join([*different[:3], *more])


def _shown(found: Mean | None, metric: str) -> str:
    if found is None:
        return ""
    digits = _DIGITS.get(metric, 4)
    error = "" if found.error is None else f" ± {found.error:.{digits}f}"
    return f"{found.value:.{digits}f}{error}"


def _aligned(cells: Mapping[str, Sequence[str]]) -> str:
    """A table of Markdown; its columns line up where the lines are not too long for that."""
    table = [[text.replace("|", "\\|") for text in (head, *column)]
             for head, column in cells.items()]  # fmt: skip
    widths = [max(map(len, column)) for column in table]
    if sum(widths) + 3 * len(widths) + 1 > _WIDTH:
        widths = [0] * len(widths)
    rows = [list(row) for row in zip(*table, strict=True)]
    rows.insert(1, ["-" * max(3, width) for width in widths])
    return "\n".join(
        "| " + " | ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH))
