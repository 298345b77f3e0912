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
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import NullFormatter

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
# Longer labels of an axis, all together, would overlap.
_LETTERS_ALONG = 60
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
        """The part that chose the best epoch."""
        return self.summary["selected_on"]

    def objective(self, metric: str) -> float | None:
        """A metric on that part in the best epoch."""
        return selected_metrics(self.summary)[self.selected_on].get(metric)

    def figure(self, column: str) -> float | None:
        """A number of a column of the tables, see `columns`; None if the run has none."""
        of = self.summary
        if column == "parameters":
            # Of the tables and of the dense layers.
            return sum(of["parameters"].values()) if "parameters" in of else None
        if column.startswith("validation_"):
            return of.get("validation", {}).get(column.removeprefix("validation_"))
        if column.startswith("last_"):
            return of.get("last", {}).get("test", {}).get(column.removeprefix("last_"))
        return of.get(column)


class Mean(NamedTuple):
    """Mean over the seeds, and its standard error s/sqrt(n), which is None for a single seed."""

    value: float
    error: float | None


def _mean(values: Iterable[float | None]) -> Mean | None:
    defined = [value for value in values if value is not None]
    if not defined:
        return None
    error = statistics.stdev(defined) / math.sqrt(len(defined)) if len(defined) > 1 else None
    return Mean(statistics.fmean(defined), error)


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

    def mean(self, column: str) -> Mean | None:
        """Mean of a column over the trials that succeeded."""
        return _mean(outcome.figure(column) for outcome in self.done)


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
            objective = _mean(values)
        published = {name: of.auc.get(row) for name, of in sweep.section.published.items()}
        rejected = [one for one in of_row if one.trial.point != point]
        found.append(Result(point, of_point, objective, published, rejected))
    if sweep.study:
        sign = -1 if sweep.study.direction == "maximize" else 1
        # A point with a failed trial is last.
        found.sort(key=lambda one: math.inf if one.failed else sign * one.objective.value)
    return found


def columns(metrics: Iterable[str], found: Sequence[Result]) -> list[str]:
    """Measured columns: metrics of the best epoch, then those of the last one, and of the run.

    Such as `validation_auc` (if a run has a validation part), `auc` of the test part, `last_auc`
    of the test part, `train_seconds`.
    """
    validated = any("validation" in outcome.summary for one in found for outcome in one.done)
    parts = ("validation_", "") if validated else ("",)
    metrics = list(metrics)
    chosen = [f"{part}{metric}" for metric in metrics if metric in METRICS for part in parts]
    return chosen + [f"last_{metric}" if metric in METRICS else metric for metric in metrics]


def _title_of(column: str) -> str:
    """A column in Markdown and pictures, such as `validation AUC`."""
    for prefix, part in (("validation_", "validation"), ("last_", "last test"), ("", "test")):
        metric = column.removeprefix(prefix)
        if column.startswith(prefix) and metric in METRICS:
            return f"{part} {shown_as(metric)}"
    return shown_as(column)


def _selected_on(found: Iterable[Result]) -> str:
    """The parts that chose the best epochs."""
    return " and ".join(sorted({one.selected_on for of in found for one in of.done}))


def to_csv(sweep: Sweep, found: Sequence[Result]) -> str:
    """A line per point, numbers in full."""

    def cells(mean: str, error: str, of: Mean | None) -> dict[str, float | None]:
        return dict(zip((mean, error), of or (None, None), strict=True))

    # All computed metrics, also those that Markdown leaves out.
    computed = [m for m in METRICS if any(m in o.summary for one in found for o in one.done)]
    shown = columns(dict.fromkeys([*sweep.section.report.metrics, *computed]), found)
    rows = []
    for one in found:
        row: dict[str, Any] = dict(one.point.labels)
        if sweep.study:
            # Its labels are rounded.
            row = {k: json.loads(v) for k, _, v in (o.partition("=") for o in one.point.overrides)}
            row |= cells(f"{sweep.study.metric}_sought", "sought_stderr", one.objective)
        for column in shown:
            row |= cells(f"{column}_mean", f"{column}_stderr", one.mean(column))
        row |= {"seeds": len(one.done), "failed": one.failed, "selected_on": _selected_on([one])}
        rows.append(row | {f"auc_published_{name}": auc for name, auc in one.published.items()})
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_markdown(sweep: Sweep, found: Sequence[Result]) -> str:
    """The data, how epochs were chosen, the table, and which trials failed."""
    section = sweep.section
    parts = sorted({outcome.selected_on for one in found for outcome in one.done})
    shown = columns(section.report.metrics, found)
    rows = []
    for one in found:
        row = dict(one.point.labels)
        if sweep.study:
            metric = sweep.study.metric
            row[f"{shown_as(metric)}, selecting part"] = _shown(one.objective, metric)
        row |= {_title_of(column): _shown(one.mean(column), column) for column in shown}
        row["seeds"] = f"{len(one.done)}" + (f", {one.failed} failed" if one.failed else "")
        if len(parts) > 1:
            row["selected on"] = _selected_on([one])
        for name, auc in one.published.items():
            row[f"published AUC, {name}"] = "" if auc is None else f"{auc:.4f}"
        rows.append(row)
    chosen = "; ".join(_HOW.get(part, part) for part in parts) or "no trial was finished"
    several = ", mean ± standard error over the seeds" if len(section.seeds) > 1 else ""
    how = f"Figures at {chosen}{several}; `last`: after the last epoch, for comparison."
    if section.tune:
        how += (
            f" {section.tune}: the tried value with the largest AUC on the part that chose the "
            f"epoch, with seed {section.seeds[0]}."
        )
    said = [_data(sweep, found), _wrapped(how), _table(rows)]
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
    sources = []
    # Seeds do not change the data.
    for trial in (one.done[0].trial for one in found if one.done):
        data = sweep.config_of(trial).data
        path, split = getattr(data, "path", ""), getattr(data, "split", "")
        paths = [path] if isinstance(path, str) else path
        words = [data.kind, *paths, f"split {split}" if split else ""]
        sources.append(", ".join(filter(None, words)))
    rows, tested = (
        _different(f"{outcome.summary['rows'][part]:,}" for outcome in done)
        for part in ("train", "test")
    )
    return _wrapped(
        f"Data: {_different(sources)}; {rows} training rows, {tested} test rows; selected on the "
        f"{_different(outcome.selected_on for outcome in done)} part."
    )


def _different(texts: Iterable[str]) -> str:
    """The first three different texts, and how many more there are."""
    different = list(dict.fromkeys(texts))
    more = [f"{len(different) - 3} more"] if len(different) > 3 else []
    return " or ".join([*different[:3], *more])


def _shown(found: Mean | None, column: str) -> str:
    if found is None:
        return ""
    digits = _DIGITS.get(column, 4)
    # No seed changes these.
    without = found.error is None or column in ("parameters", "attainable_auc")
    return f"{found.value:,.{digits}f}" + ("" if without else f" ± {found.error:,.{digits}f}")


def _table(rows: Sequence[dict[str, str]]) -> str:
    """A Markdown table, from the cells of its rows by their heading."""
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


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
        aucs = [column for column in columns(["auc"], found) if column != "last_auc"]
        figures = {
            "auc.png": _draw_grid(sweep, found, aucs),
            "seconds.png": _draw_grid(sweep, found, ["train_seconds"]),
        }
    for name, figure in figures.items():
        # Names with dollar signs are not formulas.
        as_written(figure.findobj(Text))
        write_file(folder / name, to_png(figure))
    return [folder / name for name in figures]


def _draw_grid(sweep: Sweep, found: Sequence[Result], shown: Sequence[str]) -> Figure:
    """A panel per column, side by side: validation and test may differ in level."""
    axes = [axis for axis in found[0].point.labels if axis != sweep.section.tune]
    x = sweep.section.report.x or axes[-1]
    figure = Figure(figsize=(1.5 + 6.0 * len(shown), 4.5), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    drawn = {one.point.labels[x] for one in found}
    along = [text for text in choices(x, sweep.section.grid[x]) if text in drawn]
    # Lines would suggest that names, such as the clips', have an order.
    in_order = all(text[:1].isdigit() for text in along)
    for panel, column in zip(panels, shown, strict=True):
        lines: dict[str, list[Result]] = {}
        for one in found:
            if one.mean(column) is not None:
                others = " / ".join(one.point.labels[axis] for axis in axes if axis != x)
                lines.setdefault(others, []).append(one)
        for number, (title, of_line) in enumerate(lines.items()):
            style = _STYLES[number % len(_STYLES)][: None if in_order else 1]
            # Side by side, so that error bars do not overlap.
            shift = 0.06 * (number - (len(lines) - 1) / 2)
            places = [along.index(one.point.labels[x]) + shift for one in of_line]
            values, errors = zip(*(one.mean(column) for one in of_line), strict=True)
            errors = [error or 0.0 for error in errors]
            panel.errorbar(places, values, errors, fmt=style, capsize=3, label=title or None)
        panel.set_xticks(range(len(along)), along)
        if sum(map(len, along)) > _LETTERS_ALONG:
            panel.tick_params(axis="x", rotation=30)
        panel.set(xlabel=x, ylabel=_title_of(column))
        panel.grid(alpha=0.3)
    bars = any((mean := one.mean(column)) and mean.error for one in found for column in shown)
    heading = f"best epoch chosen on the {_selected_on(found)} part"
    heading += "; bars: standard error" if bars else ""
    attainable = {outcome.summary.get("attainable_auc") for one in found for outcome in one.done}
    if "auc" in shown and len(attainable) == 1 and (auc := attainable.pop()):
        heading += f"\nthe true click probabilities reach a test AUC of {auc:.4f}"
    figure.suptitle(heading, fontsize=9)
    if panels[-1].get_legend_handles_labels()[0]:
        title = " / ".join(axis for axis in axes if axis != x)
        panels[-1].legend(loc="best", fontsize=8, title=title, title_fontsize=8)
    return figure


def _draw_study(sweep: Sweep, found: Sequence[Result]) -> Figure:
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
    course.set(xlabel="trial", ylabel=f"{metric} of the {_selected_on(found)} part")
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
        axes.set_xlabel(name)
        if what.log:
            axes.set_xscale("log")
            # By default powers of ten are formulas.
            axes.xaxis.set(major_formatter="{x:g}", minor_formatter=NullFormatter())
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    return figure
