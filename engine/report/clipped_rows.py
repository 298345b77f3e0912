"""Share of rows that single steps clipped, by field and by how often an id occurs in the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from stampede.engine.report.drawing import (
    Drawing,
    listed,
    not_shown,
    sparse_markers,
    with_styles,
)
from stampede.engine.report.learning_curves import SAMPLES
from stampede.engine.report.panels import MOST_PANELS, finish_grid, panel_grid
from stampede.engine.report.run_records import RunRecord

# Touched and clipped rows by what they are grouped by.
_Groups = dict[Any, dict[str, int]]


def draw_by_field(runs: Sequence[RunRecord]) -> Drawing:
    """Clipped share of the rows of each field in the steps that were counted."""
    caption = "Share of the ids of a batch whose gradient was clipped, in single steps, by field."
    left_out = sorted(
        {field for run in runs for line in run.of_kind("clipping") for field in line["left_out"]}
    )
    sentences = (f"Not counted, several ids in a sample: {listed(left_out)}.",) if left_out else ()
    drawing = ("clipped_by_field", "Clipped rows by field", caption)
    return _draw(runs, *drawing, lambda line: line["fields"], str, sentences)


def draw_by_count(runs: Sequence[RunRecord]) -> Drawing:
    """Clipped share of the rows by the occurrences of their id in the global batch."""
    caption = (
        "Share of the ids of a batch whose gradient was clipped, in single steps, by how often the "
        "id occurs in that global batch."
    )

    def groups(line: dict[str, Any]) -> _Groups:
        return {count["from"]: count for count in line["counts"]}

    drawing = ("clipped_by_count", "Clipped rows by frequency of the id", caption)
    return _draw(runs, *drawing, groups, _range, ())


def _draw(
    runs: Sequence[RunRecord],
    name: str,
    title: str,
    caption: str,
    groups: Callable[[dict[str, Any]], _Groups],
    panel_title: Callable[[Any], str],
    sentences: tuple[str, ...],
) -> Drawing:
    found = [(run, style) for run, style in with_styles(runs) if run.of_kind("clipping")]
    left_out = sentences + not_shown(
        runs, [run for run, _ in found], "not counted (train.clip_stats_every asks for it)"
    )
    lines = [line for run, _ in found for line in run.of_kind("clipping")]
    keys = list(dict.fromkeys(key for line in lines for key in groups(line)))
    if keys and isinstance(keys[0], int):
        keys.sort()
    clipping = {key for line in lines for key, count in groups(line).items() if count["clipped"]}
    never = [panel_title(key) for key in keys if key not in clipping]
    if never:
        left_out += (f"Not shown, as no row was clipped: {listed(never)}.",)
    keys = [key for key in keys if key in clipping]
    if len(keys) > MOST_PANELS:
        left_out += (f"The first {MOST_PANELS} of {len(keys)} are shown.",)
        keys = keys[:MOST_PANELS]
    if not keys:
        return Drawing(name, title, caption, None, left_out)
    figure, panels = panel_grid([panel_title(key) for key in keys], SAMPLES, "clipped")
    for panel, key in zip(panels, keys, strict=True):
        for run, style in found:
            points = [
                (run.samples_at(line), count["clipped"] / count["touched"])
                for line in run.of_kind("clipping")
                if (count := groups(line).get(key)) is not None and count["touched"]
            ]
            if points:
                panel.plot(*zip(*points, strict=True), **{**style, "markersize": 3},
                           label=run.label, markevery=sparse_markers(len(points)))  # fmt: skip
        panel.xaxis.set_major_locator(MaxNLocator(3))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.yaxis.set_major_formatter(PercentFormatter(1))
    finish_grid(figure, panels)
    return Drawing(name, title, caption, figure, left_out)


def _range(first: int) -> str:
    last = 2 * first - 1
    return "once" if first == 1 else f"{first:,} to {last:,} times"
