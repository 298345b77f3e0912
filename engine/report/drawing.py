"""Common parts of a report's pictures: styles, curves over seeds, legends, reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from stampede.engine.plots import as_written
from stampede.engine.report.run_records import RunRecord, Setting

# Inches: on a phone this shrinks to about 3.7, and text to the size of a footnote.
_WIDTH, _HEIGHT, _LEGEND_LINE = 5.4, 3.4, 0.19

# Longest label of a legend with two columns.
_NARROW = 22

# Dark to light alternates, so that neighbours also differ in print (Okabe and Ito's colours).
_COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#8c3b73", "#7f7f7f")
_DASHES = ("-", "--", "-.", ":", (0, (7, 2, 1, 2, 1, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "x", "P")

# Points of a run by step: x and value.
Points = dict[int, tuple[float, float]]
# Over the seeds of a setting: x, mean, lowest and highest value.
Curve = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Style = dict[str, Any]


@dataclass(frozen=True)
class Drawing:
    """A picture, or why there is none.

    Attributes:
        name: of its file, without the ending.
        figure: the picture; None if no run recorded what it needs.
        left_out: a sentence for each thing that is not shown, with the reason.
    """

    name: str
    title: str
    caption: str
    figure: Figure | None = None
    left_out: tuple[str, ...] = ()


def styles(count: int) -> list[Style]:
    """Colour, dashes and marker for `count` curves; up to 210 differ."""
    looks = zip(cycle(_COLOURS), cycle(_DASHES), cycle(_MARKERS), strict=False)
    return [
        {
            "color": colour,
            "linestyle": dashes,
            "marker": marker,
            "markersize": 4.5,
            "markerfacecolor": "white" if index % 2 else colour,
            "linewidth": 1.6,
        }
        for index, (colour, dashes, marker) in enumerate(islice(looks, count))
    ]


def with_styles(settings: Sequence[Setting]) -> list[tuple[Setting, Style]]:
    """Settings with their styles, the same in every picture."""
    return list(zip(settings, styles(len(settings)), strict=True))


def new_figure(height: float = _HEIGHT) -> tuple[Figure, Axes]:
    """A figure with axes, in inches; `with_legend` makes room for the legend."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def as_shares(axes: Axes) -> None:
    """Show an axis from 0 up, in percent."""
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(bottom=0)


def name_rows(axes: Axes, names: Sequence[str], **looks: Any) -> None:
    """Label the rows of a picture from top to bottom."""
    axes.set_yticks(range(len(names)), names, **looks)
    as_written(axes.get_yticklabels())
    axes.invert_yaxis()


def with_legend(figure: Figure) -> Figure:
    """Add a legend below the figure."""
    handles = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    shown = [shortened(label) for label in handles]
    columns = 2 if len(shown) > 3 and max(map(len, shown)) <= _NARROW else 1
    lines = -(-len(shown) // columns)
    figure.set_figheight(figure.get_figheight() + lines * _LEGEND_LINE)
    legend = figure.legend(
        list(handles.values()), shown, loc="outside lower center", ncols=columns, frameon=False,
        handlelength=4, fontsize=9,
    )  # fmt: skip
    as_written(legend.get_texts())
    return figure


def not_shown(settings: Sequence[Setting], shown: Sequence[Setting], why: str) -> tuple[str, ...]:
    """The sentence on runs that a picture lacks, if there are any."""
    there = {run.path for one in shown for run in one.runs}
    absent = [one.label for one in settings if not any(run.path in there for run in one.runs)]
    return (f"Not shown, {why}: {listed(absent)}.",) if absent else ()


def shortened(text: str, most: int = 56) -> str:
    """Cut the middle out of a long name."""
    if len(text) <= most:
        return text
    half = (most - 2) // 2
    return f"{text[:half]}..{text[-half:]}"


def listed(names: Sequence[str]) -> str:
    """Names, joined for a sentence."""
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


def curves(
    settings: Sequence[Setting], points: Callable[[RunRecord], Points]
) -> list[tuple[Setting, Style, Curve]]:
    """For each setting with points, the mean over its seeds at their common steps."""
    all_curves = []
    for one, style in with_styles(settings):
        found = [of_run for run in one.runs if (of_run := points(run))]
        steps = sorted(set.intersection(*map(set, found))) if found else []
        if steps:
            values = np.array([[of_run[step] for step in steps] for of_run in found])
            x, y = values[..., 0], values[..., 1]
            all_curves.append((one, style, (x.mean(0), y.mean(0), y.min(0), y.max(0))))
    return all_curves


def add_curve(axes: Axes, curve: Curve, style: Style, label: str) -> None:
    """Draw the mean, and the band where seeds differ."""
    x, mean, low, high = curve
    # Draw about ten markers.
    axes.plot(x, mean, **style, markevery=max(1, len(x) // 10), label=label)
    if (high > low).any():
        axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
