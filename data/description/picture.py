"""Statistics as one page of pictures, readable in black and white."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullLocator

from stampede.data.description.statistics import Column, Statistics, short

# More panels would be too small to read on a page; the text has all columns.
_MOST_PANELS = 48
_PER_ROW = 9

# Inches.
_WIDTH, _OVER_TIME, _PANEL_ROW, _HEADING = 14.0, 2.4, 1.35, 0.4
_COUNTS = EngFormatter(sep="")  # such as 2.5k


def draw(title: str, statistics: Statistics, path: Path) -> None:
    """Draw a PNG: click rate and rows over time, then a small panel for each column.

    Columns without any value appear in the text only.
    """
    panels = (
        (
            "Share of the ids that the k most frequent cover (k on a log scale)",
            [column for column in statistics.ids if column.distinct],
            _coverage,
        ),
        (
            "Numbers: rows by value (wide ranges on a log scale), and their click rate (line)",
            [column for column in statistics.numbers if column.summary],
            _histogram,
        ),
    )
    panels = [some for some in panels if some[1]]
    rows = [-(-min(len(columns), _MOST_PANELS) // _PER_ROW) for _, columns, _ in panels]
    heights = [_OVER_TIME, *(count * _PANEL_ROW + _HEADING for count in rows)]
    figure = Figure(figsize=(_WIDTH, sum(heights) + _HEADING), layout="constrained")
    figure.suptitle(title, fontsize=13)
    over_time, *strips = figure.subfigures(len(heights), 1, False, height_ratios=heights).ravel()
    _over_time(over_time.subplots(), statistics)
    for strip, (heading, columns, draw_panel) in zip(strips, panels, strict=True):
        if len(columns) > _MOST_PANELS:
            heading += f"; first {_MOST_PANELS} of {len(columns)} columns"
        shown = columns[:_MOST_PANELS]
        across = min(_PER_ROW, len(shown))
        axes = strip.subplots(-(-len(shown) // across), across, squeeze=False).ravel()
        strip.suptitle(heading, fontsize=11, x=0.01, ha="left")
        for panel, column in zip(axes, shown, strict=False):
            panel.set_title(short(column.name, 14), fontsize=7.5, pad=2)
            draw_panel(panel, column)
            panel.tick_params(labelsize=7, pad=1.5, length=2)
        for panel in axes[len(shown) :]:
            panel.set_axis_off()
    figure.savefig(path, dpi=100)


def _over_time(axes: Axes, statistics: Statistics) -> None:
    slices = statistics.slices
    starts, width = slices["start"].to_numpy(), statistics.width
    places = starts + width / 2
    # Beyond these times matplotlib has no calendar.
    if statistics.by_time and starts.min() >= 0 and starts.max() < 200 * 365 * 86400:
        places = [datetime.fromtimestamp(place, timezone.utc) for place in places]
        locator = AutoDateLocator()
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.set_xlabel("time (UTC)")
        width /= 86400
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel("seconds since 1970" if statistics.by_time else "row")
    rows = axes.twinx()
    rows.bar(places, slices["rows"].to_numpy(), width * 0.9, color="0.85")
    rows.set_ylabel("rows (bars)", fontsize=8)
    rows.yaxis.set_major_formatter(_COUNTS)
    axes.set_zorder(rows.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.plot(places, (slices["clicks"] / slices["rows"]).to_numpy(), "ko-", ms=3)
    mean = statistics.clicks.sum() / statistics.rows.sum()
    axes.axhline(mean, color="0.4", linestyle="--", linewidth=1)
    heading = (
        f"Click rate (line) and rows (bars) in slices of {statistics.span(statistics.width)}; "
        f"dashed: all rows, {mean:.4f}"
    )
    axes.set_title(heading, loc="left", fontsize=11)


def _coverage(axes: Axes, column: Column) -> None:
    places, covered = column.curve
    distinct = EngFormatter(places=0, sep="")(column.distinct)
    axes.set_title(f"{short(column.name, 14)}: {distinct} ids", fontsize=7.5, pad=2)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.tick_params(labelleft=axes.get_subplotspec().is_first_col())
    axes.grid(alpha=0.3)
    axes.fill_between(places, covered, color="0.8")
    axes.plot(places, covered, "k-", linewidth=1.1, marker="." if len(places) < 5 else "")
    axes.set_xscale("log")
    last = max(column.distinct, 10)
    axes.set_xlim(0.9, last * 1.1)
    decades = int(np.log10(last))
    _log_ticks(axes, [10**power for power in range(0, decades + 1, 1 if decades < 4 else 2)])


def _histogram(axes: Axes, column: Column) -> None:
    edges, rows, clicks = column.histogram
    axes.set_yticks([])
    axes.stairs(rows, edges, fill=True, color="0.7")
    axes.set_ylim(0, rows.max() * 1.05 or 1)
    rate = axes.twinx()
    some = rows > 0
    middles = (edges[:-1] + edges[1:]) / 2
    rate.plot(middles[some], clicks[some] / rows[some], "k-", linewidth=1)
    rate.set_ylim(bottom=0)
    rate.locator_params(axis="y", nbins=2)
    rate.tick_params(labelsize=6, pad=1, length=2)
    axes.set_xlim(edges[0], edges[-1])
    if edges[-1] >= 64 and edges[-1] == 2 * edges[-2]:
        axes.set_xscale("symlog", linthresh=1, linscale=0.3)
        step = 1 if edges[-1] < 1e4 else 2
        powers = range(step, int(np.log10(edges[-1])) + 1, step)
        _log_ticks(axes, [0, *(10**power for power in powers)])
    else:
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


def _log_ticks(axes: Axes, ticks: list[int]) -> None:
    axes.set_xticks(ticks, [_COUNTS(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
