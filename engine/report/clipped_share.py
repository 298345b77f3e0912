"""Share of rows that were clipped, over time."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.ticker import EngFormatter, PercentFormatter

from stampede.engine.report.drawing import (
    Drawing,
    add_legend,
    new_figure,
    not_shown,
    sparse_markers,
    with_styles,
)
from stampede.engine.report.learning_curves import SAMPLES
from stampede.engine.report.run_records import RunRecord


def draw_clipped(runs: Sequence[RunRecord]) -> Drawing:
    """Share of all rows of the batches so far that were clipped."""
    title = "Clipped rows"
    caption = "Share of the rows in all batches up to then whose gradient was clipped."
    found = [(run, style, _shares(run)) for run, style in with_styles(runs) if _shares(run)]
    logged = [run for run in runs if run.of_kind("train")]
    left_out = (
        *not_shown(runs, logged, "no step was logged"),
        *not_shown(
            logged, [run for run, *_ in found], "the tables' optimizer does not count clipped rows"
        ),
    )
    if not found:
        return Drawing("clipped", title, caption, None, left_out)
    figure = new_figure()
    axes = figure.subplots()
    for run, style, points in found:
        axes.plot(*zip(*points, strict=True), **style, markevery=sparse_markers(len(points)),
                  label=run.label)  # fmt: skip
    axes.set(xlabel=SAMPLES, ylabel="clipped so far")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    add_legend(figure)
    return Drawing("clipped", title, caption, figure, left_out)


def _shares(run: RunRecord) -> list[tuple[int, float]]:
    return [
        (run.samples_at(line), line["clipped_share"])
        for line in run.of_kind("train")
        if line.get("clipped_share") is not None
    ]
