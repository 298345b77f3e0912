"""AUC against the time spent in training."""

from __future__ import annotations

from collections.abc import Sequence

from stampede.engine.report.drawing import Drawing, add_legend, new_figure, not_shown, with_styles
from stampede.engine.report.run_records import RunRecord


def draw_wall_time(runs: Sequence[RunRecord]) -> Drawing:
    """Test AUC over seconds of training."""
    title = "AUC against wall time"
    caption = (
        "Test AUC over the seconds spent in training, without evaluation and checkpoints. Times of "
        "runs on different machines, or beside other work, do not compare."
    )
    found = [(run, style, _points(run)) for run, style in with_styles(runs) if _points(run)]
    left_out = not_shown(
        runs, [run for run, *_ in found], "no AUC with its time of training was recorded"
    )
    if not found:
        return Drawing("auc_wall_time", title, caption, None, left_out)
    figure = new_figure()
    axes = figure.subplots()
    for run, style, points in found:
        axes.plot(*zip(*points, strict=True), **style, label=run.label)
    axes.set(xlabel="seconds of training", ylabel="test AUC")
    axes.grid(alpha=0.3)
    add_legend(figure)
    return Drawing("auc_wall_time", title, caption, figure, left_out)


def _points(run: RunRecord) -> list[tuple[float, float]]:
    recorded = [
        (line["train_seconds"], line["auc"])
        for line in run.evaluations("test")
        if line["auc"] is not None and line.get("train_seconds") is not None
    ]
    # Runs of earlier versions say only when they ended.
    end = run.summary.get("train_seconds"), run.summary.get("auc")
    return recorded or ([end] if None not in end else [])
