"""Mean label against mean prediction, in buckets of the predictions."""

from __future__ import annotations

from collections.abc import Sequence

from stampede.engine.report.drawing import Drawing, add_legend, new_figure, not_shown, with_styles
from stampede.engine.report.run_records import RunRecord

# Above this ratio of the largest to the smallest probability the low ones would be one heap.
_WIDE = 20


def draw_calibration(runs: Sequence[RunRecord]) -> Drawing:
    """Calibration of the last evaluation of the test part."""
    title = "Calibration"
    caption = (
        "Share of clicks in ten buckets of equally many test samples, sorted by prediction, at the "
        "last evaluation. On the dotted line predictions are right; beneath it they are too high."
    )
    found = [(run, style, _buckets(run)) for run, style in with_styles(runs) if _buckets(run)]
    left_out = not_shown(
        runs,
        [run for run, *_ in found],
        "no calibration_buckets were recorded (evaluate.metrics asks for them)",
    )
    if not found:
        return Drawing("calibration", title, caption, None, left_out)
    figure = new_figure(4.4)
    axes = figure.subplots()
    values = [value for *_, points in found for point in points for value in point]
    low, high = min(values), max(values)
    if low > 0 and high / low > _WIDE:
        axes.set(xscale="log", yscale="log")
        low, high = low / 1.3, high * 1.3
    else:
        low, high = 0, high * 1.05
    axes.plot([low, high], [low, high], color="0.35", linestyle=(0, (1, 3)), label="calibrated")
    for run, style, points in found:
        axes.plot(*zip(*points, strict=True), **style, label=run.label)
    axes.set(xlabel="mean prediction", ylabel="mean label", aspect="equal")
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.grid(alpha=0.3)
    add_legend(figure)
    return Drawing("calibration", title, caption, figure, left_out)


def _buckets(run: RunRecord) -> list[tuple[float, float]]:
    last = run.evaluations("test")[-1:]
    buckets = [bucket for line in last for bucket in line.get("calibration_buckets") or ()]
    return [(bucket["mean_prediction"], bucket["mean_label"]) for bucket in buckets]
