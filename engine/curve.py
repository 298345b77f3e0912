"""The learning curve of a run as a picture."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from stampede.engine.figures import to_png


def draw_curve(lines: list[dict[str, Any]], title: str) -> bytes:
    """Draw training loss and evaluation AUC over steps.

    Args:
        lines: lines of `metrics.jsonl`.
        title: heading.

    Returns:
        The content of a PNG file.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    training = [line for line in lines if line["kind"] == "train"]
    left.plot([line["step"] for line in training], [line["loss"] for line in training], "k-")
    left.set(xlabel="step", ylabel="training loss", title="Loss of the global batch")
    for part, style in (("validation", "o--"), ("test", "s-")):
        points = [line for line in lines if line.get("part") == part]
        if points:
            right.plot(
                [point["step"] for point in points],
                [point["auc"] for point in points],
                style,
                label=part,
            )
    attainable = [
        line["attainable_auc"] for line in lines if line.get("attainable_auc") is not None
    ]
    if attainable:
        right.axhline(attainable[-1], color="gray", linestyle=":", label="attainable")
    right.set(xlabel="step", ylabel="AUC", title="AUC")
    right.legend(loc="best")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    return to_png(figure)
