"""Training loss and AUC while runs go on."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.ticker import EngFormatter

from stampede.engine.report.drawing import (
    Drawing,
    add_legend,
    new_figure,
    not_shown,
    sparse_markers,
    with_styles,
)
from stampede.engine.report.run_records import RunRecord

SAMPLES = "training samples (steps x batch size)"


def draw_loss(runs: Sequence[RunRecord]) -> Drawing:
    """Loss of the global batch over the samples trained on."""
    title, caption = "Training loss", "Loss of single global batches, at the logged steps."
    found = [(run, style) for run, style in with_styles(runs) if _losses(run)]
    left_out = not_shown(runs, [run for run, _ in found], "no training step was logged")
    if not found:
        return Drawing("loss", title, caption, None, left_out)
    figure = new_figure()
    axes = figure.subplots()
    for run, style in found:
        points = _losses(run)
        axes.plot(*zip(*points, strict=True), **style, markevery=sparse_markers(len(points)),
                  label=run.label)  # fmt: skip
    axes.set(xlabel=SAMPLES, ylabel="logloss")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    add_legend(figure)
    return Drawing("loss", title, caption, figure, left_out)


def draw_auc(runs: Sequence[RunRecord], part: str) -> Drawing:
    """AUC of a part over the samples trained on."""
    name, title = f"auc_{part}", f"AUC on the {part} part"
    caption = f"Exact AUC of the {part} part at every evaluation."
    found = [(run, style) for run, style in with_styles(runs) if _aucs(run, part)]
    left_out = not_shown(runs, [run for run, _ in found], f"no AUC of the {part} part was recorded")
    if not found:
        return Drawing(name, title, caption, None, left_out)
    attainable = {
        line["attainable_auc"]
        for run, _ in found
        for line in run.evaluations(part)[-1:]
        if line.get("attainable_auc") is not None
    }
    # Runs on different data have different ones. A line would squeeze the curves beneath it.
    if len(attainable) == 1:
        caption += f" The true click probabilities would reach {attainable.pop():.4f}."
    figure = new_figure()
    axes = figure.subplots()
    for run, style in found:
        axes.plot(*zip(*_aucs(run, part), strict=True), **style, label=run.label)
    axes.set(xlabel=SAMPLES, ylabel="AUC")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    add_legend(figure)
    return Drawing(name, title, caption, figure, left_out)


def _losses(run: RunRecord) -> list[tuple[int, float]]:
    lines = run.of_kind("train")
    return [(run.samples_at(line), line["loss"]) for line in lines if line["loss"] is not None]


def _aucs(run: RunRecord, part: str) -> list[tuple[int, float]]:
    lines = run.evaluations(part)
    return [(run.samples_at(line), line["auc"]) for line in lines if line["auc"] is not None]
