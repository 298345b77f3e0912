"""Histograms of the norms of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from stampede.engine.checkpoint import read_manifest
from stampede.engine.console import progress_bar
from stampede.engine.errors import RunFolderError
from stampede.engine.report.drawing import (
    Drawing,
    listed,
    not_shown,
    with_styles,
)
from stampede.engine.report.panels import MOST_PANELS, finish_grid, panel_grid
from stampede.engine.report.run_records import RunRecord
from stampede.engine.tables import read_field

# To a power of ten.
_BINS = 10

# Rows of a table that are read whole; more of them want more memory than a report is worth.
_MOST_ROWS = 20_000_000

# Of fewer ids a histogram is noise.
_FEWEST_IDS = 50

# Bins of the logarithm of a norm; zero, which has none, is counted apart.
_EDGES = np.linspace(-8, 3, 11 * _BINS + 1)


def draw_embedding_norms(runs: Sequence[RunRecord]) -> Drawing:
    """Share of a field's ids by the norm of their embedding, a panel for each field.

    Raises:
        RunFolderError: a checkpoint is damaged.
    """
    name, title = "embedding_norms", "Norms of the embeddings"
    caption = (
        "Share of a field's ids by the norm of their embedding, ten bins to a power of ten, in the "
        "checkpoint of the best epoch. Ids that training never met keep their initial norm, or "
        "decay by L2."
    )
    checkpoints = [(run, style, run.checkpoint()) for run, style in with_styles(runs)]
    found = [entry for entry in checkpoints if entry[2] is not None]
    left_out = not_shown(runs, [run for run, *_ in found], "no checkpoint in the run folder")
    sizes: dict[str, int] = {}
    for *_, checkpoint in found:
        for field, rows in _sizes(checkpoint).items():
            sizes[field] = max(rows, sizes.get(field, 0))
    large = [field for field, rows in sizes.items() if rows > _MOST_ROWS]
    if large:
        left_out += (f"Not read, more than {_MOST_ROWS:,} rows: {', '.join(large)}.",)
    small = [field for field, rows in sizes.items() if rows < _FEWEST_IDS]
    if small:
        left_out += (f"Not shown, fewer than {_FEWEST_IDS} ids: {listed(small)}.",)
    fields = sorted(sizes.keys() - {*large, *small}, key=lambda field: (-sizes[field], field))
    if len(fields) > MOST_PANELS:
        left_out += (f"Of {len(fields)} fields, the {MOST_PANELS} with the most ids are shown.",)
        fields = fields[:MOST_PANELS]
    if not fields:
        return Drawing(name, title, caption, None, left_out)
    # Panels in the order of the data.
    fields = [field for field in sizes if field in fields]
    figure, panels = panel_grid(
        [f"{field}: {sizes[field]:,} ids" for field in fields],
        len(found),
        "norm of the embedding (logarithmic)",
        "share of the ids",
    )
    total = len(fields) * len(found)
    with progress_bar(total, 0, True, "reading tables", "tables", delay=5.0) as bar:
        for panel, field in zip(panels, fields, strict=True):
            zeros = 0
            for run, style, checkpoint in found:
                if field in _sizes(checkpoint):
                    zeros += _draw_field(panel, checkpoint, field, run.label, style)
                bar.update()
            if zeros:
                panel.text(0.03, 0.93, f"{zeros:,} of norm 0", transform=panel.transAxes,
                           va="top", fontsize=8)  # fmt: skip
            # Norms at the ticks instead of their logarithms.
            panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 3, 5, 10]))
            panel.xaxis.set_major_formatter(lambda power, _: f"$10^{{{power:g}}}$")
    finish_grid(figure, panels)
    return Drawing(name, title, caption, figure, left_out)


def _sizes(checkpoint: Path) -> dict[str, int]:
    return read_manifest(checkpoint)["data"]["vocabulary_sizes"]


def _draw_field(panel: Axes, checkpoint: Path, field: str, label: str, style: dict) -> int:
    """Draw a histogram; returns the number of ids of norm zero."""
    norms = read_field(checkpoint, field).embedding.norm(dim=1).numpy()
    if not np.isfinite(norms).all():
        raise RunFolderError(f"{checkpoint}: field {field!r} holds weights that are not finite")
    positive = norms[norms > 0]
    heights, edges = np.histogram(np.log10(positive.clip(1e-8, 1e3)), _EDGES)
    filled = np.flatnonzero(heights)
    if len(filled):
        first, last = max(filled[0] - 1, 0), filled[-1] + 2
        # A curve of the bins' middles takes dashes and markers, which stairs of many runs hide.
        middles = (edges[:-1] + edges[1:])[first:last] / 2
        shares = heights[first:last] / len(norms)
        panel.plot(middles, shares, **{**style, "markersize": 3}, label=label,
                   markevery=max(1, len(middles) // 5))  # fmt: skip
    return int((norms == 0).sum())
