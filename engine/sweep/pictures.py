"""Pictures of a sweep: AUC and training time of a grid, or the progress of a study."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stampede.engine.plots import as_written, to_png
from stampede.engine.sweep.results import Column, Result, axes_of, columns, selected_on
from stampede.engine.sweep.spec import Sweep, choices, shown_as
from stampede.files import write_file

# Different in black and white too.
_STYLES = ("o-", "s--", "^-.", "D:", "v-", "P--", "X-.", "*:", "<-", ">--")


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
