"""A picture of the report with its words, and how lines are told apart without colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from matplotlib.figure import Figure

from stampede.engine.figures import as_written
from stampede.engine.report.run_records import RunRecord

# Inches: on a phone this shrinks to about 3.7, where its text is still as large as a footnote.
_WIDTH, HEIGHT = 5.4, 3.4
_LEGEND_LINE = 0.19

# Characters of a label of which two stand side by side.
_NARROW = 22

# Dark to light alternates, so that neighbours differ in print, too (Okabe and Ito's colours).
_COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#8c3b73", "#7f7f7f")
_DASHES = ("-", "--", "-.", ":", (0, (7, 2, 1, 2, 1, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "x", "P")


@dataclass(frozen=True)
class Drawing:
    """A picture, or why there is none.

    Attributes:
        name: of its file, without the ending.
        title: heading.
        caption: what is shown, in a sentence or two.
        figure: the picture; None where no run recorded what it needs.
        left_out: a sentence for each thing that is not shown, with the reason.
    """

    name: str
    title: str
    caption: str
    figure: Figure | None
    left_out: tuple[str, ...] = ()


def new_figure(height: float = HEIGHT) -> Figure:
    """An empty figure, in inches; `add_legend` makes room for the legend."""
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def add_legend(figure: Figure, side: str = "lower") -> None:
    """A legend beneath the picture, or above with `upper`, where it hides nothing."""
    handles = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    shown = [shortened(label) for label in handles]
    columns = 2 if len(shown) > 3 and max(map(len, shown)) <= _NARROW else 1
    lines = -(-len(shown) // columns)
    figure.set_figheight(figure.get_figheight() + lines * _LEGEND_LINE)
    legend = figure.legend(
        list(handles.values()),
        shown,
        loc=f"outside {side} center",
        ncols=columns,
        frameon=False,
        handlelength=4,
        fontsize=9,
    )
    as_written(legend.get_texts())


def styles(count: int) -> list[dict[str, Any]]:
    """Colour, dashes and marker for so many curves; 210 of them differ."""
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


def with_styles(runs: Sequence[RunRecord]) -> list[tuple[RunRecord, dict[str, Any]]]:
    """Runs with their looks, which are the same in every picture."""
    return list(zip(runs, styles(len(runs)), strict=True))


def not_shown(runs: Sequence[RunRecord], shown: Sequence[RunRecord], why: str) -> tuple[str, ...]:
    """The sentence on runs that a picture lacks, if there are any."""
    absent = [run.label for run in runs if run not in shown]
    return (f"Not shown, {why}: {listed(absent)}.",) if absent else ()


def sparse_markers(points: int) -> int:
    """Between how many points a marker stands, so that a long line has some ten."""
    return max(1, points // 10)


def shortened(text: str, most: int = 56) -> str:
    """A long name without its middle."""
    if len(text) <= most:
        return text
    half = (most - 2) // 2
    return f"{text[:half]}..{text[-half:]}"


def listed(names: Sequence[str]) -> str:
    """Some names, as in a sentence."""
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
