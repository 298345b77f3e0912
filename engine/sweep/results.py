"""Tables and pictures of a sweep: mean and standard error over the seeds of each point."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stampede.engine.config import Config
from stampede.engine.metrics import METRICS, selected_metrics
from stampede.engine.plots import as_written, to_png
from stampede.engine.sweep.spec import Point, Sweep, Trial, choices, shown_as
from stampede.files import write_file

_WIDTH = 100
# Digits after the point, if not 4.
_DIGITS = {
    "train_seconds": 1, "best_epoch": 1, "steps": 0, "samples_per_second": 0, "parameters": 0,
}  # fmt: skip
_HOW = {
    "validation": "the epoch that was best on the validation part",
    "test": "the best epoch, chosen on the test part itself (evaluate.select_on=test): optimistic",
}
# Different in black and white too.
_STYLES = ("o-", "s--", "^-.", "D:", "v-", "P--", "X-.", "*:", "<-", ">--")


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: its `summary.json`, or the message with which it failed."""

    trial: Trial
    summary: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    @property
    def selected_on(self) -> str:
        """The part that chose the best epoch; empty if the trial failed."""
        return self.summary.get("selected_on", "")

    def objective(self, metric: str) -> float | None:
        """A metric on that part in the best epoch."""
        return selected_metrics(self.summary)[self.selected_on].get(metric)


@dataclass(frozen=True)
class Mean:
    """Mean over the seeds, and its standard error s/sqrt(n), which is None for a single seed."""

    value: float
    error: float | None


def mean(values: Iterable[float | None]) -> Mean | None:
    """Mean of the values that are defined; None if there are none."""
    defined = [value for value in values if value is not None]
    if not defined:
        return None
    error = statistics.stdev(defined) / math.sqrt(len(defined)) if len(defined) > 1 else None
    return Mean(statistics.fmean(defined), error)


@dataclass(frozen=True)
class Column:
    """A measured column of the tables.

    Attributes:
        name: in the CSV, such as `validation_auc`.
        title: in Markdown, such as `validation AUC`.
        metric, path: key in `summary.json`, and sections that lead to it; none for the test part in
            the best epoch.
    """

    name: str
    title: str
    metric: str
    path: tuple[str, ...] = ()

    def of(self, summary: Mapping[str, Any]) -> float | None:
        """The column's value in a summary; None if the run has none."""
        for section in self.path:
            summary = summary.get(section) or {}
        found = summary.get(self.metric)
        # The parameters of the tables and of the dense layers.
        return sum(found.values()) if isinstance(found, dict) else found


@dataclass(frozen=True)
class Result:
    """The trials of a point.

    Attributes:
        objective: in a study, the metric that it optimizes.
        published: AUC that others report for the point, by the name of their column.
        rejected: trials of the other values of the axis that is tuned.
    """

    point: Point
    outcomes: Sequence[Outcome]
    objective: Mean | None = None
    published: Mapping[str, float | None] = field(default_factory=dict)
    rejected: Sequence[Outcome] = ()

    @property
    def done(self) -> list[Outcome]:
        """The trials that succeeded."""
        return [outcome for outcome in self.outcomes if not outcome.message]

    @property
    def failed(self) -> int:
        """Number of failed trials."""
        return len(self.outcomes) - len(self.done)

    def mean(self, column: Column) -> Mean | None:
        """Mean over the trials that succeeded."""
        return mean(column.of(outcome.summary) for outcome in self.done)


def best_of(tried: Sequence[Outcome]) -> Outcome:
    """The trial with the largest AUC of the part that chose its epoch; failed ones are last."""
    return max(tried, key=lambda one: 0.0 if one.message else one.objective("auc") or 0.0)


def results(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Result]:
    """A result per row of the tables, in order; of a study, the best first."""
    rows: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        point = outcome.trial.point
        rows.setdefault(point.name or sweep.section.row(point), []).append(outcome)
    found = []
    for row, of_row in rows.items():
        tried = [one for one in of_row if one.trial.seed == sweep.section.seeds[0]]
        point, objective = best_of(tried).trial.point, None
        of_point = [one for one in of_row if one.trial.point == point]
        if sweep.study:
            values = (one.objective(sweep.study.metric) for one in of_point if not one.message)
            objective = mean(values)
        published = {name: of.auc.get(row) for name, of in sweep.section.published.items()}
        rejected = [one for one in of_row if one.trial.point != point]
        found.append(Result(point, of_point, objective, published, rejected))
    if sweep.study:
        sign = -1 if sweep.study.direction == "maximize" else 1
        # A point with a failed trial is last.
        found.sort(key=lambda one: math.inf if one.failed else sign * one.objective.value)
    return found


def columns(metrics: Iterable[str], found: Sequence[Result]) -> list[Column]:
    """Columns of a table: validation and test at the best epoch, then the last epoch and the run.

    If no run has a validation part, neither has the table.
    """
    validated = any("validation" in outcome.summary for one in found for outcome in one.done)
    chosen, last = [], []
    for metric in metrics:
        title = shown_as(metric)
        if metric not in METRICS:
            last.append(Column(metric, title, metric))
            continue
        if validated:
            name = f"validation_{metric}"
            chosen.append(Column(name, f"validation {title}", metric, ("validation",)))
        chosen.append(Column(metric, f"test {title}", metric))
        last.append(Column(f"last_{metric}", f"last test {title}", metric, ("last", "test")))
    return chosen + last


def axes_of(found: Sequence[Result]) -> list[str]:
    """The axes in which the points differ."""
    return list(found[0].point.labels) if found else []


def selected_on(found: Iterable[Result]) -> list[str]:
    """The parts that chose the best epochs, sorted."""
    return sorted({outcome.selected_on for one in found for outcome in one.done})


def to_csv(sweep: Sweep, found: Sequence[Result]) -> str:
    """A line per point, numbers in full."""

    def cells(of: Mean | None) -> list[float | None]:
        return [None, None] if of is None else [of.value, of.error]

    # All computed metrics, also those that Markdown leaves out.
    computed = [m for m in METRICS if any(m in o.summary for one in found for o in one.done)]
    shown = columns(dict.fromkeys([*sweep.section.report.metrics, *computed]), found)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    objective = [f"{sweep.study.metric}_sought", "sought_stderr"] if sweep.study else []
    measured = [f"{column.name}_{which}" for column in shown for which in ("mean", "stderr")]
    published = [f"auc_published_{name}" for name in sweep.section.published]
    writer.writerow(
        [*axes_of(found), *objective, *measured, "seeds", "failed", "selected_on", *published]
    )
    for one in found:
        # The labels of a study are rounded.
        row = list(one.point.labels.values())
        if sweep.study:
            row = [json.loads(text.partition("=")[2]) for text in one.point.overrides]
        row += cells(one.objective) if sweep.study else []
        for column in shown:
            row += cells(one.mean(column))
        row += [len(one.done), one.failed, " and ".join(selected_on([one]))]
        writer.writerow([*row, *one.published.values()])
    return text.getvalue()


def to_markdown(sweep: Sweep, found: Sequence[Result]) -> str:
    """The data, how epochs were chosen, the table, and which trials failed."""
    section, parts = sweep.section, selected_on(found)
    cells = {axis: [one.point.labels[axis] for one in found] for axis in axes_of(found)}
    if sweep.study:
        metric = sweep.study.metric
        title = f"{shown_as(metric)}, selecting part"
        cells[title] = [_shown(one.objective, metric) for one in found]
    for column in columns(section.report.metrics, found):
        cells[column.title] = [_shown(one.mean(column), column.metric) for one in found]
    cells["seeds"] = [
        f"{len(one.done)}" + (f", {one.failed} failed" if one.failed else "") for one in found
    ]
    if len(parts) > 1:
        cells["selected on"] = [" and ".join(selected_on([one])) for one in found]
    for name in section.published:
        shown = [one.published[name] for one in found]
        title = f"published AUC, {name}"
        cells[title] = ["" if value is None else f"{value:.4f}" for value in shown]
    chosen = "; ".join(_HOW.get(part, part) for part in parts) or "no trial was finished"
    several = ", mean ± standard error over the seeds" if len(section.seeds) > 1 else ""
    how = f"Figures at {chosen}{several}; `last`: after the last epoch, for comparison."
    if section.tune:
        how += (
            f" {section.tune}: the tried value with the largest AUC on the part that chose the "
            f"epoch, with seed {section.seeds[0]}."
        )
    said = [_data(sweep, found), _wrapped(how), _table(cells)]
    said += [
        _wrapped(f"Published AUC, {name}: {of.source}.") for name, of in section.published.items()
    ]
    trials = (outcome for one in found for outcome in (*one.outcomes, *one.rejected))
    lines = [_wrapped(f"- `{one.trial.name}`: {one.message}") for one in trials if one.message]
    if lines:
        again = "" if sweep.study else " (`--retry-failed` runs them again)"
        said.append(f"Failed{again}:\n\n" + "\n".join(lines))
    return "\n\n".join([f"# {sweep.folder.name}", *filter(None, said)]) + "\n"


def _data(sweep: Sweep, found: Sequence[Result]) -> str:
    """The data of the trials; empty if none succeeded."""
    done = [outcome for one in found for outcome in one.done]
    if not done:
        return ""
    # Seeds do not change the data.
    firsts = [one.done[0].trial for one in found if one.done]
    data = _different(_source(sweep.config_of(trial)) for trial in firsts)
    rows, tested = (
        _different(f"{outcome.summary['rows'][part]:,}" for outcome in done)
        for part in ("train", "test")
    )
    parts = _different(outcome.selected_on for outcome in done)
    return _wrapped(
        f"Data: {data}; {rows} training rows, {tested} test rows; selected on the {parts} part."
    )


def _source(config: Config) -> str:
    path, split = getattr(config.data, "path", ""), getattr(config.data, "split", "")
    paths = [path] if isinstance(path, str) else path
    return ", ".join(filter(None, [config.data.kind, *paths, f"split {split}" if split else ""]))


def _different(texts: Iterable[str]) -> str:
    """The first three different texts, and how many more there are."""
    different = list(dict.fromkeys(texts))
    more = [f"{len(different) - 3} more"] if len(different) > 3 else []
    return " or ".join([*different[:3], *more])


def _shown(found: Mean | None, metric: str) -> str:
    if found is None:
        return ""
    digits = _DIGITS.get(metric, 4)
    # No seed changes these.
    without = found.error is None or metric in ("parameters", "attainable_auc")
    error = "" if without else f" ± {found.error:,.{digits}f}"
    return f"{found.value:,.{digits}f}{error}"


def _table(cells: Mapping[str, Sequence[str]]) -> str:
    """A Markdown table; its columns are aligned if the lines are short enough."""
    table = [[text.replace("|", "\\|") for text in (head, *of)] for head, of in cells.items()]
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


def draw(sweep: Sweep, found: Sequence[Result], folder: Path) -> list[Path]:
    """Draw the trials that succeeded; returns the PNG files."""
    found = [one for one in found if one.done]
    if not found:
        return []
    if sweep.study:
        figures = {"study.png": _draw_study(sweep, found)}
    else:
        aucs = [column for column in columns(["auc"], found) if column.path != ("last", "test")]
        seconds = [Column("train_seconds", "training time, s", "train_seconds")]
        figures = {
            "auc.png": _draw_grid(sweep, found, aucs, _attainable(found)),
            "seconds.png": _draw_grid(sweep, found, seconds),
        }
    for name, figure in figures.items():
        for axes in figure.axes:
            legend = axes.get_legend()
            named = [legend.get_title(), *legend.get_texts()] if legend else []
            as_written([axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *named])
        write_file(folder / name, to_png(figure))
    return [folder / name for name in figures]


def _attainable(found: Sequence[Result]) -> str:
    """The AUC of the true click probabilities, if all trials have the same."""
    attainable = {outcome.summary.get("attainable_auc") for one in found for outcome in one.done}
    if len(attainable) > 1 or None in attainable:
        return ""
    return f"\nthe true click probabilities reach a test AUC of {attainable.pop():.4f}"


def _draw_grid(
    sweep: Sweep, found: Sequence[Result], shown: Sequence[Column], more: str = ""
) -> Figure:
    """A panel per column, side by side: validation and test may differ in level."""
    axes = [axis for axis in axes_of(found) if axis != sweep.section.tune]
    x = sweep.section.report.x or axes[-1]
    figure = Figure(figsize=(1.5 + 6.0 * len(shown), 4.5), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for panel, column in zip(panels, shown, strict=True):
        _draw_panel(panel, sweep, found, x, column)
    bars = any((mean := one.mean(column)) and mean.error for one in found for column in shown)
    heading = f"best epoch chosen on the {' and '.join(selected_on(found))} part"
    heading += "; bars: standard error" if bars else ""
    figure.suptitle(heading + more, fontsize=9)
    # The legend goes into the last panel, the test part's, which also has published values.
    if panels[-1].get_legend_handles_labels()[0]:
        title = " / ".join(axis for axis in axes if axis != x)
        panels[-1].legend(loc="best", fontsize=8, title=title, title_fontsize=8)
    return figure


def _draw_panel(axes: Axes, sweep: Sweep, found: Sequence[Result], x: str, column: Column) -> None:
    shown = {one.point.labels[x] for one in found}
    along = [text for text in choices(x, sweep.section.grid[x]) if text in shown]
    # Lines would suggest that names, such as the clips', have an order.
    in_order = all(text[:1].isdigit() for text in along)
    lines: dict[str, list[Result]] = {}
    for one in found:
        labels = one.point.labels
        others = [labels[axis] for axis in labels if axis not in (x, sweep.section.tune)]
        line = lines.setdefault(" / ".join(others), [])
        if one.mean(column) is not None:
            line.append(one)
    for number, (title, of_line) in enumerate(lines.items()):
        style = _STYLES[number % len(_STYLES)][: None if in_order else 1]
        # Side by side, so that error bars do not overlap.
        shift = 0.06 * (number - (len(lines) - 1) / 2)
        places = [along.index(one.point.labels[x]) + shift for one in of_line]
        means = [one.mean(column) for one in of_line]
        axes.errorbar(
            places,
            [mean.value for mean in means],
            [mean.error or 0.0 for mean in means],
            fmt=style,
            capsize=3,
            label=title or None,
        )
        # The small form has other data, and published values would flatten its curves.
        for marker, source in zip(cycle(style[0] + "sD^"), sweep.section.published, strict=False):
            published = [
                (place, one.published[source])
                for place, one in zip(places, of_line, strict=True)
                if one.published[source] is not None and column.name == "auc" and not sweep.small
            ]
            if published:
                axes.plot(
                    *zip(*published, strict=True),
                    marker,
                    markerfacecolor="none",
                    color="gray",
                    label=f"{title} published, {source}".strip(),
                )
    axes.set_xticks(range(len(along)), along)
    axes.set(xlabel=x, ylabel=column.title)
    axes.grid(alpha=0.3)


def _draw_study(sweep: Sweep, found: Sequence[Result]) -> Figure:
    """The metric by trial, and by each parameter."""
    parameters = sweep.study.parameters
    figure = Figure(figsize=(4 * (len(parameters) + 1), 3.8), layout="constrained")
    course, *scatters = figure.subplots(1, len(parameters) + 1, sharey=True)
    in_order = sorted((one for one in found if one.objective), key=lambda one: one.point.name)
    values = [one.objective.value for one in in_order]
    better = max if sweep.study.direction == "maximize" else min
    best = [better(values[: end + 1]) for end in range(len(values))]
    numbers = [int(one.point.name.removeprefix("trial")) for one in in_order]
    course.plot(numbers, values, "ko", markersize=4, label="trial")
    course.step(numbers, best, "k-", where="post", label="best so far")
    metric = shown_as(sweep.study.metric)
    course.set(xlabel="trial", ylabel=f"{metric} of the {' and '.join(selected_on(found))} part")
    course.xaxis.get_major_locator().set_params(integer=True)
    course.legend(loc="best", fontsize=8)
    for axes, (name, what) in zip(scatters, parameters.items(), strict=True):
        labels = [one.point.labels[name] for one in in_order]
        if what.choices:
            different = list(dict.fromkeys(labels))
            axes.plot([different.index(text) for text in labels], values, "ko")
            axes.set_xticks(range(len(different)), different)
        else:
            axes.plot([float(text) for text in labels], values, "ko")
        axes.set(xlabel=name, xscale="log" if what.log else "linear")
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    return figure
