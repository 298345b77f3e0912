"""Histograms of the norms of embeddings, a panel for each field."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from stampede.engine.console import progress_bar
from stampede.engine.errors import RunFolderError
from stampede.engine.report.drawing import Drawing, listed, not_shown, with_styles
from stampede.engine.report.norm_histograms import (
    FEWEST_IDS,
    MOST_IDS,
    NormHistogram,
    field_sizes,
    norm_histograms,
)
from stampede.engine.report.panels import MOST_PANELS, finish_grid, panel_grid
from stampede.engine.report.run_records import RunRecord


def draw_embedding_norms(runs: Sequence[RunRecord]) -> Drawing:
    """Share of a field's ids by the norm of their embedding, a panel for each field."""
    name, title = "embedding_norms", "Norms of the embeddings"
    caption = (
        "Share of a field's ids by the norm of their embedding, ten bins to a power of ten, in the "
        "checkpoint of the best epoch. Ids that training never met keep their initial norm, or "
        "decay by L2."
    )
    checkpoints, left_out = _checkpoints(runs)
    sizes: dict[str, int] = {}
    for path in checkpoints.values():
        for field, ids in field_sizes(path).items():
            sizes[field] = max(ids, sizes.get(field, 0))
    large = [field for field, ids in sizes.items() if ids > MOST_IDS]
    if large:
        left_out += (f"Not read, more than {MOST_IDS:,} ids: {listed(large)}.",)
    small = [field for field, ids in sizes.items() if ids < FEWEST_IDS]
    if small:
        left_out += (f"Not shown, fewer than {FEWEST_IDS} ids: {listed(small)}.",)
    histograms, damaged = _histograms(checkpoints, len(sizes) * len(checkpoints))
    left_out += damaged
    there = {field for of_run in histograms.values() for field in of_run}
    fields = sorted(there, key=lambda field: (-sizes[field], field))
    if len(fields) > MOST_PANELS:
        left_out += (f"Of {len(fields)} fields, the {MOST_PANELS} with the most ids are shown.",)
    # Panels in the order of the data.
    fields = [field for field in sizes if field in fields[:MOST_PANELS]]
    if not fields:
        return Drawing(name, title, caption, None, left_out)
    figure, panels = panel_grid(
        [f"{field}: {sizes[field]:,} ids" for field in fields],
        "norm of the embedding (logarithmic)",
        "share of the ids",
    )
    for panel, field in zip(panels, fields, strict=True):
        zeros = 0
        for run, style in with_styles(runs):
            histogram = histograms.get(run.label, {}).get(field)
            if histogram is not None:
                zeros += histogram.zeros
                _draw(panel, histogram, run.label, style)
        if zeros:
            panel.text(0.03, 0.93, f"{zeros:,} of norm 0", transform=panel.transAxes, va="top",
                       fontsize=8)  # fmt: skip
        # Norms at the ticks instead of their logarithms.
        panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 3, 5, 10]))
        panel.xaxis.set_major_formatter(lambda power, _: f"$10^{{{power:g}}}$")
    finish_grid(figure, panels)
    return Drawing(name, title, caption, figure, left_out)


def _draw(panel: Axes, histogram: NormHistogram, label: str, style: dict[str, Any]) -> None:
    # A curve takes dashes and markers, which stairs of many runs hide.
    panel.plot(histogram.middles, histogram.shares, **{**style, "markersize": 3}, label=label,
               markevery=max(1, len(histogram.middles) // 5))  # fmt: skip


def _checkpoints(runs: Sequence[RunRecord]) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Checkpoints by label of the run, and sentences on those that cannot be read."""
    found, absent, damaged = {}, [], ()
    for run in runs:
        try:
            path = run.checkpoint()
            if path is None:
                absent.append(run)
                continue
            field_sizes(path)
            found[run.label] = path
        except RunFolderError as failure:
            damaged += (f"{run.label} is not shown: {failure}.",)
    others = [run for run in runs if run not in absent]
    return found, not_shown(runs, others, "no checkpoint in the run folder") + damaged


def _histograms(
    checkpoints: dict[str, Path], tables: int
) -> tuple[dict[str, dict[str, NormHistogram]], tuple[str, ...]]:
    found, damaged = {}, ()
    with progress_bar(tables, 0, True, "reading tables", "tables", delay=5.0) as bar:
        for label, path in checkpoints.items():
            try:
                found[label] = norm_histograms(path, bar.update)
            except RunFolderError as failure:
                damaged += (f"{label} is not shown: {failure}.",)
    return found, damaged
