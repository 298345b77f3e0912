"""Statistics as one page, readable in black and white."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from stampede.data.description.statistics import IdColumn, NumberColumn, Statistics
from stampede.data.description.table import width
from stampede.data.prepared.manifest import PARTS

Column = TypeVar("Column", IdColumn, NumberColumn)

# More panels than these are too small to read on a page; the table has all columns.
_MOST_PANELS = 48
_PER_ROW = 9
_BINS = 40

# Inches.
_WIDTH, _RATE, _PANEL_ROW, _SHARES, _HEADING = 14.0, 2.4, 1.35, 3.4, 0.5
_LEFT, _RIGHT = 0.75, 0.25
_STYLES = ({"color": "white"}, {"color": "0.6"}, {"color": "black"})


def draw(title: str, statistics: Statistics, path: Path) -> None:
    """Draw a page.

    Args:
        title: heading.
        statistics: of the data.
        path: PNG to write.
    """
    ids, numbers = statistics.ids[:_MOST_PANELS], statistics.numbers[:_MOST_PANELS]
    heights = [
        _RATE,
        *([_panels_height(len(ids)), _SHARES] if ids else []),
        *([_panels_height(len(numbers))] if numbers else []),
    ]
    figure = Figure(figsize=(_WIDTH, sum(heights) + _HEADING))
    figure.suptitle(title, fontsize=13, y=1 - 0.15 / figure.get_figheight())
    # An empty strip on top is for the heading.
    strips = figure.subfigures(len(heights) + 1, 1, height_ratios=[_HEADING, *heights])[1:]
    strips = iter(strips)
    _draw_rate(next(strips), statistics)
    if ids:
        heading = "Share of the ids that the k most frequent cover (k on a log scale)"
        _draw_panels(next(strips), ids, len(statistics.ids), heading, _draw_coverage)
        _draw_shares(next(strips), statistics)
    if numbers:
        heading = "Numbers: rows by value (wide ranges on a log scale)"
        _draw_panels(next(strips), numbers, len(statistics.numbers), heading, _draw_histogram)
    figure.savefig(path, dpi=100)


def _draw_rate(strip: SubFigure, statistics: Statistics) -> None:
    slices = statistics.slices
    axes = strip.subplots()
    _place(strip, left=_LEFT, right=_RIGHT, bottom=0.55, top=0.35)
    table = slices.table
    rates = (table["positives"] / table["rows"]).to_numpy()
    middles = table["start"].to_numpy() + slices.width / 2
    if slices.by_time and _drawable(table["start"].to_numpy()):
        axes.plot([datetime.fromtimestamp(m, timezone.utc) for m in middles], rates, "ko-", ms=3)
        locator = AutoDateLocator()
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.set_xlabel("time (UTC)")
    else:
        axes.plot(middles, rates, "ko-", ms=3)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel("seconds since 1970" if slices.by_time else "row")
    heading = f"Label rate over {'time' if slices.by_time else 'rows'}, slices of {width(slices)}"
    total = int(statistics.rows.sum())
    if total:
        overall = statistics.positives.sum() / total
        axes.axhline(overall, color="0.5", linestyle="--", linewidth=1)
        heading += f"; dashed: all rows, {overall:.4f}"
    axes.grid(alpha=0.3)
    axes.set_title(heading, loc="left", fontsize=11)


def _drawable(seconds: np.ndarray) -> bool:
    """Whether the calendar has these times."""
    return len(seconds) > 0 and seconds.min() >= 0 and seconds.max() < 200 * 365 * 86400


def _draw_panels(
    strip: SubFigure,
    columns: Sequence[Column],
    all_columns: int,
    heading: str,
    draw_one: Callable[[Axes, Column], None],
) -> None:
    """A small panel for each column."""
    across = min(_PER_ROW, len(columns))
    panels = strip.subplots(-(-len(columns) // across), across, squeeze=False).ravel()
    _place(strip, left=_LEFT, right=_RIGHT, bottom=0.3, top=0.62)
    strip.subplots_adjust(wspace=0.12, hspace=0.6)
    if len(columns) < all_columns:
        heading += f"; first {len(columns)} of {all_columns} columns"
    strip.text(
        _LEFT / _WIDTH, 1 - 0.3 / _inches(strip), heading, fontsize=11, ha="left", va="bottom"
    )
    for panel, column in zip(panels, columns, strict=False):
        draw_one(panel, column)
        panel.tick_params(labelsize=7, pad=1.5, length=2)
        # All panels of a row have the same scale upwards.
        panel.tick_params(labelleft=panel.get_subplotspec().is_first_col())
    for panel in panels[len(columns) :]:
        panel.set_axis_off()


def _draw_coverage(axes: Axes, column: IdColumn) -> None:
    places, covered = column.curve
    axes.set_title(f"{_cut(column.name)}: {_short(column.distinct)} ids", fontsize=7.5, pad=2)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.grid(alpha=0.3)
    if column.distinct:
        axes.fill_between(places, covered, color="0.8", step=None)
        axes.plot(places, covered, "k-", linewidth=1.1, marker="." if len(places) < 5 else "")
    axes.set_xscale("log")
    last = max(column.distinct, 10)
    axes.set_xlim(0.9, last * 1.1)
    decades = int(np.log10(last))
    ticks = [10**power for power in range(0, decades + 1, 1 if decades < 4 else 2)]
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_shares(strip: SubFigure, statistics: Statistics) -> None:
    """Missing values of all columns above, unseen ids below."""
    columns = [*statistics.ids[:_MOST_PANELS], *statistics.numbers[:_MOST_PANELS]]
    columns = [column for column in columns if column.by_part.known]
    upper, lower = strip.subplots(2, 1, sharex=True)
    _place(strip, left=_LEFT, right=_RIGHT, bottom=0.95, top=0.35)
    strip.subplots_adjust(hspace=0.35)
    shown = [part for part, rows in enumerate(statistics.rows) if rows]
    for axes, what in ((upper, "missing"), (lower, "unseen")):
        for place, part in enumerate(shown):
            shares = [_share(column, what, part) for column in columns]
            positions = np.arange(len(columns)) + (place - (len(shown) - 1) / 2) * 0.26
            axes.bar(
                positions, shares, 0.26, label=PARTS[part], edgecolor="black", lw=0.5,
                **_STYLES[part],
            )  # fmt: skip
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.set_ylim(0, max(axes.get_ylim()[1], 0.01))
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3, axis="y")
        axes.set_xlim(-0.6, len(columns) - 0.4)
    upper.set_title("Share of missing values", loc="left", fontsize=11)
    lower.set_title(
        "Share of unseen ids, those that the training part lacks", loc="left", fontsize=11
    )
    upper.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8, frameon=False)
    names = [_cut(column.name) for column in columns]
    crowded = len(columns) > 30 or max(map(len, names)) > 6
    lower.set_xticks(range(len(columns)), names, rotation=90 if crowded else 0, fontsize=7.5)


def _share(column: IdColumn | NumberColumn, what: str, part: int) -> float:
    by_part = column.by_part
    share = by_part.missing_share(part) if what == "missing" else by_part.unseen_share(part)
    return share or 0.0


def _draw_histogram(axes: Axes, column: NumberColumn) -> None:
    axes.set_title(_cut(column.name), fontsize=7.5, pad=2)
    axes.set_yticks([])
    values = column.sample
    if not len(values):
        axes.text(0.5, 0.5, "no value", transform=axes.transAxes, ha="center", fontsize=8)
        axes.set_xticks([])
        return
    low, middle, high = np.quantile(values, [0.001, 0.5, 0.999])
    # Counts and prices: most values near zero, some a thousand times larger.
    wide = high > 50 and high > 10 * max(abs(middle), 1)
    if wide:
        axes.set_xscale("symlog", linthresh=1, linscale=0.3)
        edges = _doubling_edges(low, high)
    else:
        edges = _even_edges(low, high, whole=bool((values == np.round(values)).all()))
    shares = np.histogram(values, edges)[0] / len(values)
    axes.stairs(shares, edges, fill=True, color="0.35")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, shares.max() * 1.05 or 1)
    if wide:
        step = 1 if high < 1e4 else 2
        powers = range(step, int(np.log10(high)) + 1, step)
        ticks = [0, *(10**power for power in powers)]
        axes.set_xticks(ticks, [_short(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


def _even_edges(low: float, high: float, whole: bool) -> np.ndarray:
    """Bins of one width; those of whole numbers hold the same number of them."""
    # Of thousands of whole numbers nobody sees how many a bin holds.
    if whole and high - low < 100 * _BINS and max(-low, high) < 2**50:
        step = max(1, int(np.ceil((high - low + 1) / _BINS)))
        return np.arange(np.floor(low), high + step + 1, step) - 0.5
    return np.linspace(low, high if high > low else low + max(1, abs(low)), _BINS + 1)


def _doubling_edges(low: float, high: float) -> np.ndarray:
    """0, 1, 2, 4, ... as far as needed, also below zero; finer bins would be a comb of counts."""
    up, down = (2.0 ** np.arange(np.ceil(np.log2(max(x, 1))) + 1) for x in (high, -low))
    return np.concatenate([-down[::-1] if low < 0 else [], [0.0], up])


def _panels_height(columns: int) -> float:
    return -(-columns // _PER_ROW) * _PANEL_ROW + 0.5


def _inches(strip: SubFigure) -> float:
    return strip.bbox.height / strip.figure.dpi


def _place(strip: SubFigure, left: float, right: float, bottom: float, top: float) -> None:
    """Margins in inches."""
    height = _inches(strip)
    strip.subplots_adjust(
        left=left / _WIDTH, right=1 - right / _WIDTH, bottom=bottom / height, top=1 - top / height
    )


def _short(count: int) -> str:
    """For example 12k or 3.4M."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            digits = 0 if count >= 10 * size or count % size == 0 else 1
            return f"{count / size:.{digits}f}{unit}"
    return str(count)


def _cut(name: str) -> str:
    return name if len(name) <= 14 else name[:12] + ".."
