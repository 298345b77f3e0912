"""A grid of small panels, narrow enough for a phone."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stampede.engine.report.drawing import add_legend, new_figure, shortened

MOST_PANELS = 30
_ACROSS, _HEIGHT = 3, 1.3


def panel_grid(titles: Sequence[str], xlabel: str, ylabel: str) -> tuple[Figure, list[Axes]]:
    """A panel for each title, all with one scale to the right.

    Args:
        titles: at least one; long ones are shortened.
    """
    down = -(-len(titles) // _ACROSS)
    figure = new_figure(0.5 + down * _HEIGHT)
    panels = figure.subplots(down, _ACROSS, squeeze=False, sharex=True).ravel()
    for panel, title in zip(panels, titles, strict=False):
        panel.set_title(shortened(title, 24), fontsize=9, parse_math=False)
        panel.tick_params(labelsize=8, labelbottom=True)
        panel.grid(alpha=0.3)
    for panel in panels[len(titles) :]:
        panel.set_axis_off()
    figure.supxlabel(xlabel, fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    return figure, list(panels[: len(titles)])


def finish_grid(figure: Figure, panels: Sequence[Axes]) -> None:
    """The legend of all that is drawn, each label once, and scales upwards from 0."""
    for panel in panels:
        panel.set_ylim(bottom=0)
    add_legend(figure, "upper")
