"""Results as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stampede.engine.figures import as_written, to_png
from stampede.engine.sweeps.results import Column, Result, columns
from stampede.engine.sweeps.sections import shown_as
from stampede.engine.sweeps.sweep import Sweep
from stampede.engine.sweeps.table import axes_of
from stampede.files import write_file

# Told apart in black and white too.
_STYLES = ("o-", "s--", "^-.", "D:", "v-", "P--", "X-.", "*:", "<-", ">--")


def draw(sweep: Sweep, found: Sequence[Result], folder: Path) -> list[Path]:
    """Draw AUC and training time of a grid, or the course of a study; the PNG files."""
    found = [one for one in found if one.done]
    if not found:
        return []
    if sweep.study:
        return [_draw_study(sweep, found, folder / "study.png")]
    chosen = [column for column in columns(["auc"], found) if column.path != ("last", "test")]
    seconds = Column("train_seconds", "training time, s", "train_seconds")
    return [
        _draw_grid(sweep, found, chosen, folder / "auc.png"),
        _draw_grid(sweep, found, [seconds], folder / "seconds.png"),
    ]


def _draw_grid(sweep: Sweep, found: Sequence[Result], shown: Sequence[Column], path: Path) -> Path:
    """A panel for each column, side by side; the parts of the data may differ in level."""
    x = sweep.section.report.x or axes_of(found)[-1]
    figure = Figure(figsize=(1.5 + 6.0 * len(shown), 4.5), layout="constrained")
    others = [axis for axis in axes_of(found) if axis != x]
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for panel, column in zip(panels, shown, strict=True):
        _draw_panel(panel, sweep, found, x, column)
    parts = " and ".join(sorted({one.selected_on for one in found}))
    bars = any((mean := one.mean(column)) and mean.error for one in found for column in shown)
    told = f"best epoch chosen on the {parts} part" + ("; bars: standard error" if bars else "")
    figure.suptitle(told, fontsize=9)
    # Published figures are of the test part, the last panel.
    if panels[-1].get_legend_handles_labels()[0]:
        legend = panels[-1].legend(loc="best", fontsize=8, title=" / ".join(others))
        legend.get_title().set_fontsize(8)
    return _save(figure, path)


def _draw_panel(axes: Axes, sweep: Sweep, found: Sequence[Result], x: str, column: Column) -> None:
    along = list(dict.fromkeys(one.point.labels[x] for one in found))
    # A line would say that names such as those of clips have an order.
    in_order = all(text[:1].isdigit() for text in along)
    lines: dict[str, list[Result]] = {}
    for one in found:
        others = [text for axis, text in one.point.labels.items() if axis != x]
        lines.setdefault(" / ".join(others), []).append(one)
    for number, (title, of_line) in enumerate(lines.items()):
        style = _STYLES[number % len(_STYLES)]
        style = style if in_order else style[0]
        of_line = [one for one in of_line if one.mean(column) is not None]
        points = [(along.index(one.point.labels[x]), one.mean(column)) for one in of_line]
        # Side by side, so that error bars can be told apart.
        shift = 0.06 * (number - (len(lines) - 1) / 2)
        axes.errorbar(
            [place + shift for place, _ in points],
            [of_seeds.value for _, of_seeds in points],
            [of_seeds.error or 0.0 for _, of_seeds in points],
            fmt=style,
            capsize=3,
            label=_legend_label(title) if title else None,
        )
        # A small form is of other data: beside figures of the whole its own would be one line.
        published = column.name == "auc" and not sweep.small
        if published and any(one.published is not None for one in of_line):
            given = [(p, o.published) for (p, _), o in zip(points, of_line, strict=True)]
            axes.plot(
                [place + shift for place, value in given if value is not None],
                [value for _, value in given if value is not None],
                style[0],
                markerfacecolor="none",
                color="gray",
                label=_legend_label(f"{title} published".strip()),
            )
    axes.set_xticks(range(len(along)), along)
    as_written(axes.get_xticklabels())
    axes.set(xlabel=x, ylabel=column.title)
    axes.grid(alpha=0.3)


def _legend_label(text: str) -> str:
    # Matplotlib leaves labels that begin with an underscore out of legends.
    return f" {text}" if text.startswith("_") else text


def _draw_study(sweep: Sweep, found: Sequence[Result], path: Path) -> Path:
    names = list(sweep.study.parameters)
    figure = Figure(figsize=(4 * (len(names) + 1), 3.8), layout="constrained")
    course, *scatters = figure.subplots(1, len(names) + 1, sharey=True)
    in_order = sorted((one for one in found if one.sought), key=lambda one: one.point.name)
    values = [one.sought.value for one in in_order]
    better = max if sweep.study.direction == "maximize" else min
    best = [better(values[: end + 1]) for end in range(len(values))]
    numbers = [int(one.point.name.removeprefix("trial")) for one in in_order]
    course.plot(numbers, values, "ko", markersize=4, label="trial")
    course.step(numbers, best, "k-", where="post", label="best so far")
    parts = " and ".join(sorted({one.selected_on for one in found}))
    course.set(xlabel="trial", ylabel=f"{shown_as(sweep.study.metric)} of the {parts} part")
    course.xaxis.get_major_locator().set_params(integer=True)
    course.legend(loc="best", fontsize=8)
    for axes, name in zip(scatters, names, strict=True):
        what = sweep.study.parameters[name]
        labels = [one.point.labels[name] for one in in_order]
        if what.choices:
            different = list(dict.fromkeys(labels))
            axes.plot([different.index(text) for text in labels], values, "ko")
            axes.set_xticks(range(len(different)), different)
            as_written(axes.get_xticklabels())
        else:
            axes.plot([float(text) for text in labels], values, "ko")
        axes.set_xlabel(name)
        if what.log:
            axes.set_xscale("log")
    for axes in (course, *scatters):
        axes.grid(alpha=0.3)
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    for axes in figure.axes:
        legend = axes.get_legend()
        named = [legend.get_title(), *legend.get_texts()] if legend else []
        as_written([axes.title, axes.xaxis.label, axes.yaxis.label, *named])
    write_file(path, to_png(figure))
    return path
