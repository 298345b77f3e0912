"""Matplotlib pictures of a run.

Matplotlib is imported by the functions that draw: it takes half a second, and every rank of a run
imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from stampede.engine.start_up import importing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

# Least span of an AUC axis below the lowest best point.
_BELOW = 0.01


def as_written(texts: Iterable[Text]) -> None:
    """Show texts literally: a name with dollar signs is not a formula."""
    for text in texts:
        text.set_parse_math(False)


def to_png(figure: Figure, dpi: int = 120) -> bytes:
    """The content of a PNG file."""
    file = BytesIO()
    figure.savefig(file, dpi=dpi, format="png", metadata={"Software": None})
    return file.getvalue()


def show_small_differences(axes: Axes, curves: Sequence[Sequence[float]]) -> bool:
    """Scale an axis of AUC so that 0.002 is visible; return whether early points are cut off."""
    best = [max(curve) for curve in curves]
    spread = max(best) - min(best)
    lowest = min(min(curve) for curve in curves)
    bottom = max(lowest - 0.002, min(best) - max(_BELOW, spread / 2))
    axes.set_ylim(bottom, max(best) + max(0.002, spread / 10))
    axes.locator_params(axis="y", nbins=8, steps=[1, 2, 5, 10])
    axes.yaxis.set_major_formatter("{x:.4f}")
    return lowest < bottom


def draw_curve(lines: Sequence[dict[str, Any]], title: str) -> bytes:
    """The learning curve of a run as PNG: losses and AUC over steps, from `metrics.jsonl`."""
    with importing():
        # savefig would import it later.
        from matplotlib.backends import backend_agg  # noqa: F401
        from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4))
    # Given margins: to find them, matplotlib would draw everything two more times.
    figure.subplots_adjust(0.075, 0.13, 0.985, 0.86, wspace=0.24)
    left, right = figure.subplots(1, 2)
    training = [line for line in lines if line["kind"] == "train"]
    goals = any(line.get("goals") for line in lines)
    left.plot(
        [line["step"] for line in training],
        [line["loss"] for line in training],
        color="0.6",
        # The logloss of a part is the mean over several goals.
        label="training, sum over the goals" if goals else "training, global batches",
    )
    aucs = []
    for part, style in (("validation", "o--"), ("test", "s-")):
        points = [line for line in lines if line.get("part") == part]
        if not points:
            continue
        steps = [point["step"] for point in points]
        left.plot(steps, [point["logloss"] for point in points], style, label=part)
        right.plot(steps, [point["auc"] for point in points], style, label=part)
        aucs.append([point["auc"] for point in points if point["auc"] is not None])
    left.set(xlabel="step", ylabel="logloss", title="Loss")
    right.set(xlabel="step", ylabel="AUC", title="AUC")
    if any(aucs) and show_small_differences(right, [curve for curve in aucs if curve]):
        right.set_title("AUC (early points are cut off)")
    attainable = [line["attainable_auc"] for line in lines if line.get("attainable_auc")]
    if attainable:
        # A line would flatten the curves.
        right.plot([], [], " ", label=f"attainable: {attainable[-1]:.4f}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(loc="best")
    figure.suptitle(title)
    return to_png(figure)


def draw_periods(lines: Sequence[dict[str, Any]], title: str) -> bytes:
    """AUC and logloss of each period before training on it, and the number of ids, as PNG.

    Args:
        lines: of the periods, see `stampede.engine.periods.results`.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, 4))
    figure.subplots_adjust(0.06, 0.13, 0.985, 0.86, wspace=0.22)
    first, second, third = figure.subplots(1, 3)
    # The first period is scored by an untrained model.
    scored = [line for line in lines if line["period"] > 1]
    for axes, name in ((first, "auc"), (second, "logloss")):
        for prefix, label, style in (("", "all rows", "o-"), ("new_ids_", "with new ids", "s--")):
            points = [line for line in scored if line.get(prefix + name) is not None]
            numbers, values = [p["period"] for p in points], [p[prefix + name] for p in points]
            axes.plot(numbers, values, style, markersize=3, label=label)
        axes.legend(loc="best")
    first.set(title="AUC before training", xlabel="period")
    second.set(title="Logloss before training", xlabel="period")
    third.plot([line["period"] for line in lines], [line["ids"] for line in lines], "o-")
    third.set(title="Rows of all tables", xlabel="period")
    third.set_ylim(bottom=0)
    for axes in (first, second, third):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.suptitle(title)
    as_written([figure._suptitle])
    return to_png(figure)
