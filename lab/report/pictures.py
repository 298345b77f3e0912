"""Pictures of the report.

A curve is the mean over seeds, with a band from the lowest to the highest. Each picture says what
it lacks because runs did not record it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import cycle, islice
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import (
    EngFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from stampede.lab.report.records import (
    PARTS,
    RunRecord,
    Setting,
    differing_keys,
    readable,
    settings_of,
)

# Inches: on a phone this shrinks to about 3.7, and text to the size of a footnote.
_WIDTH, _HEIGHT, _LEGEND_LINE = 5.4, 3.4, 0.19

# Longest label of a legend with two columns.
_NARROW = 22

# Dark to light alternates, so that neighbours also differ in print (Okabe and Ito's colours).
_COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#8c3b73", "#7f7f7f")
_DASHES = ("-", "--", "-.", ":", (0, (7, 2, 1, 2, 1, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "x", "P")
# A fill for each phase; neighbours differ in brightness and hatching.
_FILLS = (
    ("#000000", ""), ("#e69f00", "//"), ("#0072b2", ""), ("#cccccc", ".."), ("#8c3b73", "xx"),
    ("#56b4e9", ""), ("#d55e00", "\\\\"), ("#f0e442", ""), ("#009e73", "--"), ("#ffffff", ""),
)  # fmt: skip

_SAMPLES = "training samples (steps x batch size)"
_CLIPPED = "clipped"

# Least span of an AUC axis below the lowest best point.
_BELOW = 0.01

# Points of a run by step: x and value.
Points = dict[int, tuple[float, float]]
# Over the seeds of a setting: x, mean, lowest and highest value.
Curve = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Style = dict[str, Any]
# Settings with their styles, the same in every picture.
Styled = Sequence[tuple[Setting, Style]]


@dataclass
class Picture:
    """A picture, or why there is none.

    Attributes:
        name: of its file, without the ending.
        figure: None if no run recorded what it needs.
        left_out: sentences on what is not shown, and why.
    """

    name: str
    title: str
    caption: str
    figure: Figure | None = None
    left_out: list[str] = field(default_factory=list)

    def begin(self, height: float = _HEIGHT) -> Axes:
        """Make the figure; its height in inches is without the legend."""
        self.figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = self.figure.subplots()
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        return axes

    def finish(self) -> Picture:
        """Format the axes and add a legend below the figure."""
        (axes,) = self.figure.axes
        if axes.get_xlabel() == _SAMPLES:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if axes.get_ylabel() == _CLIPPED:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
            axes.set_ylim(bottom=0)
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        shown = [shortened(label) for label in handles]
        columns = 2 if len(shown) > 3 and max(map(len, shown)) <= _NARROW else 1
        lines = -(-len(shown) // columns)
        self.figure.set_figheight(self.figure.get_figheight() + lines * _LEGEND_LINE)
        legend = self.figure.legend(
            list(handles.values()), shown, loc="outside lower center", ncols=columns,
            frameon=False, handlelength=4, fontsize=9,
        )  # fmt: skip
        as_written(legend.get_texts())
        return self

    def lacks(self, names: Sequence[str], why: str) -> None:
        """Note names that are not shown."""
        if names:
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            self.left_out.append(f"Not shown, {why}: {', '.join(names[:6])}{more}.")


def all_pictures(runs: Sequence[RunRecord], drawn: Sequence[RunRecord]) -> list[Picture]:
    """Every picture of runs on the same data; those `drawn` get curves."""
    settings = settings_of(drawn)
    goals = list(dict.fromkeys(goal for run in drawn for goal in run.goals))
    styled = list(zip(settings, styles(len(settings)), strict=True))
    return [
        _lines(
            # If no run has periods, do not list the runs as missing.
            styled if any(run.periods for run in drawn) else [],
            "periods_auc",
            "AUC of each period",
            "Exact AUC of each period before it was trained on.",
            # An untrained model scores the first.
            lambda run: _points(run.periods[1:], "auc", "period"),
            "there is no second period",
            ("period", "AUC of each period"),
        ),
        *(_auc(styled, part) for part in PARTS),
        *(_auc(styled, part, goal) for goal in goals for part in PARTS),
        _loss(styled),
        _lines(
            styled,
            "auc_wall_time",
            "AUC against wall time",
            "Test AUC over the seconds spent in training, without evaluation and checkpoints. "
            "Times of runs on different or busy machines cannot be compared.",
            lambda run: _points(run.evaluations("test"), "auc", "train_seconds"),
            "no AUC with its training time was recorded",
            ("seconds of training", "test AUC"),
        ),
        _batch_size(runs),
        *(_calibration(styled, goal) for goal in goals or [""]),
        _lines(
            styled,
            "clipped",
            "Clipped rows",
            "Share of the rows in all batches up to then whose gradient was clipped.",
            lambda run: _points(run.of_kind("train"), "clipped_share"),
            "no step was logged, or the tables' optimizer does not count clipped rows",
            (_SAMPLES, _CLIPPED),
        ),
        _time_by_phase(drawn),
    ]


def as_written(texts: Iterable[Text]) -> None:
    """Show texts literally: a name with dollar signs is not a formula."""
    for text in texts:
        text.set_parse_math(False)


def to_png(figure: Figure, dpi: int) -> bytes:
    """The content of a PNG file."""
    file = BytesIO()
    figure.savefig(file, dpi=dpi, format="png", metadata={"Software": None})
    return file.getvalue()


def show_small_differences(axes: Axes, curves: Sequence[np.ndarray]) -> bool:
    """Scale an axis of AUC so that 0.002 is visible; whether early points are cut off."""
    best, lowest = [max(curve) for curve in curves], min(min(curve) for curve in curves)
    spread = max(best) - min(best)
    bottom = max(lowest - 0.002, min(best) - max(_BELOW, spread / 2))
    axes.set_ylim(bottom, max(best) + max(0.002, spread / 10))
    axes.yaxis.set_major_formatter("{x:.4f}")
    return lowest < bottom


def styles(count: int) -> list[Style]:
    """Colour, dashes and marker for `count` curves; up to 210 differ."""
    looks = zip(cycle(_COLOURS), cycle(_DASHES), cycle(_MARKERS), strict=False)
    return [
        {
            "color": colour,
            "linestyle": dashes,
            "marker": marker,
            "markersize": 4.5,
            "markerfacecolor": "white" if index % 2 else colour,
            "linewidth": 1.6,
        }
        for index, (colour, dashes, marker) in enumerate(islice(looks, count))
    ]


def shortened(text: str, most: int = 56) -> str:
    """Cut the middle out of a long name."""
    half = (most - 2) // 2
    return text if len(text) <= most else f"{text[:half]}..{text[-half:]}"


def _points(lines: Iterable[dict[str, Any]], key: str, x: str = "trained") -> Points:
    return {line["step"]: (line[x], line[key]) for line in lines if line.get(key) is not None}


def _curves(
    styled: Styled,
    points: Callable[[RunRecord], Points],
    picture: Picture | None = None,
    why: str = "",
) -> list[tuple[Setting, Style, Curve]]:
    """For each setting with points, the mean over its seeds at their common steps.

    Args:
        picture, why: notes settings without points.
    """
    curves = []
    for one, style in styled:
        found = [of_run for run in one.runs if (of_run := points(run))]
        steps = sorted(set.intersection(*map(set, found))) if found else []
        if steps:
            values = np.array([[of_run[step] for step in steps] for of_run in found])
            x, y = values[..., 0], values[..., 1]
            curves.append((one, style, (x.mean(0), y.mean(0), y.min(0), y.max(0))))
    if picture is not None:
        shown = [one for one, *_ in curves]
        picture.lacks([one.label for one, _ in styled if one not in shown], why)
    return curves


def _add_curve(axes: Axes, curve: Curve, style: Style, label: str) -> None:
    x, mean, low, high = curve
    # Draw about ten markers.
    axes.plot(x, mean, **style, markevery=max(1, len(x) // 10), label=label)
    if (high > low).any():
        axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)


def _lines(
    styled: Styled,
    name: str,
    title: str,
    caption: str,
    points: Callable[[RunRecord], Points],
    why: str,
    labels: tuple[str, str],
) -> Picture:
    picture = Picture(name, title, caption)
    found = _curves(styled, points, picture, why)
    if not found:
        return picture
    axes = picture.begin()
    for one, style, curve in found:
        _add_curve(axes, curve, style, one.label)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    if "AUC" in labels[1] and show_small_differences(axes, [curve[1] for *_, curve in found]):
        picture.caption += f" Points below {axes.get_ylim()[0]:.3f} are cut off."
    return picture.finish()


def _auc(styled: Styled, part: str, goal: str = "") -> Picture:
    """The AUC; with several goals their mean, or that of one of them."""
    of = f" of {goal}" if goal else ""
    caption = f"Exact AUC{of} of the {part} part at every evaluation."
    if not goal and any(one.goals for one, _ in styled):
        caption += " Of several goals, it is the mean that chooses the best epoch."
    runs = [run for one, _ in styled for run in one.runs]
    last = [line for run in runs for line in run.evaluations(part, goal)[-1:]]
    attainable = {line["attainable_auc"] for line in last if line.get("attainable_auc") is not None}
    # Not as a line, which would squeeze the curves below it.
    if len(attainable) == 1:
        caption += f" The true click probabilities would reach {attainable.pop():.4f}."
    return _lines(
        styled,
        f"auc_{part}{'_' * bool(goal)}{goal}",
        f"AUC{of} on the {part} part",
        caption,
        lambda run: _points(run.evaluations(part, goal), "auc"),
        f"no AUC{of} of the {part} part was recorded",
        (_SAMPLES, f"{part} AUC"),
    )


def _loss(styled: Styled) -> Picture:
    caption = (
        "Loss of the global batches at the logged steps (thin, mean of neighbours) and logloss of "
        "the validation part at every evaluation (with markers; of the test part if there is no "
        "validation part). Where the curves part, the run overfits."
    )
    if any(one.goals for one, _ in styled):
        caption += " Of several goals, the loss is the weighted sum, and the logloss the mean."
    picture = Picture("loss", "Training and validation loss", caption)

    def training(run: RunRecord) -> Points:
        return _points(run.of_kind("train"), "loss")

    def held_out(run: RunRecord) -> Points:
        return _points(run.evaluations("validation") or run.evaluations("test"), "logloss")

    trained = _curves(styled, training, picture, "no training step was logged")
    if not trained:
        return picture
    evaluated = {one: curve for one, _, curve in _curves(styled, held_out)}
    axes, tops = picture.begin(), []
    for one, style, (x, y, *_) in trained:
        # Average neighbours: the loss of every batch would be a wide band.
        size = -(-len(x) // 60)
        x, y = ([of[i : i + size].mean() for i in range(0, len(of), size)] for of in (x, y))
        axes.plot(x, y, **{**style, "marker": "", "linewidth": 0.8})
        tops.append(np.quantile(y, 0.9))
        if one in evaluated:
            _add_curve(axes, evaluated[one], style, one.label)
            tops.append(evaluated[one][1].max())
        else:
            axes.plot([], [], **style, label=one.label)
    # Cut off the first steps, whose losses would squeeze all others.
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.03 * max(tops)))
    axes.set(xlabel=_SAMPLES, ylabel="logloss")
    return picture.finish()


def _batch_size(runs: Sequence[RunRecord]) -> Picture:
    ended = [run for run in runs if run.metric("test", "auc") is not None]
    chosen = " and the ".join(sorted({run.summary["selected_on"] for run in ended}))
    caption = (
        f"Test AUC of the selected epoch, chosen on the {chosen} part: mean over the seeds, with "
        "the lowest and the highest. A line joins runs that differ only in seed, batch size and "
        "settings that follow the batch size."
    )
    picture = Picture("auc_batch_size", "AUC against batch size", caption)
    absent = [one.label for one in settings_of(runs) if not {*one.runs} & {*ended}]
    picture.lacks(absent, "not finished or without an AUC")
    sizes = sorted({run.batch_size for run in ended})
    if len(sizes) < 2:
        picture.left_out.append("Finished runs of at least two batch sizes are needed.")
        return picture
    axes = picture.begin()
    lines = _along_batch_size(ended)
    for (label, members), style in zip(lines.items(), styles(len(lines)), strict=True):
        x = sorted({run.batch_size for run in members})
        aucs = [[run.metric("test", "auc") for run in members if run.batch_size == n] for n in x]
        mean, low, high = (np.array([of(each) for each in aucs]) for of in (fmean, min, max))
        axes.errorbar(x, mean, [mean - low, high - mean], **style, capsize=3, label=label)
    axes.set(xlabel="global batch size", ylabel="test AUC", xscale="log")
    axes.set_xticks(sizes)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    if len(sizes) > 6:
        axes.tick_params("x", labelrotation=45)
    return picture.finish()


def _along_batch_size(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs that differ only in batch size and seed, by their label."""
    sizes = {run.batch_size for run in runs}
    # A key with one value per batch size, such as epochs, follows the batch size.
    keys = [
        key
        for key in differing_keys(runs)
        if len({(run.batch_size, readable(run.compared.get(key))) for run in runs}) > len(sizes)
        and key != "run.seed"
    ]
    # Labels use the last part of a key if that is unambiguous.
    short = [key.rsplit(".", 1)[1] for key in keys]
    names = [s if short.count(s) == 1 else key for s, key in zip(short, keys, strict=True)]
    found = defaultdict(list)
    for run in runs:
        values = [readable(run.compared.get(key)) for key in keys]
        shown = [f"{n}={v}" for n, v in zip(names, values, strict=True) if v != "null"]
        found[", ".join(shown) or ("others" if keys else "all runs")].append(run)
    return found


def _calibration(styled: Styled, goal: str = "") -> Picture:
    def buckets(run: RunRecord) -> Points:
        found = run.metric("test", "calibration_buckets", goal=goal)
        if not run.summary:
            last = run.evaluations("test", goal)[-1:]
            found = last[0].get("calibration_buckets") if last else None
        return dict(enumerate((one["mean_prediction"], one["mean_label"]) for one in found or ()))

    caption = (
        "Share of clicks in ten buckets of equally many test samples, sorted by prediction, after "
        "the selected epoch (for unfinished runs, at the newest evaluation). On the dotted line "
        "predictions are right; below it they are too high."
    )
    name = f"calibration_{goal}" if goal else "calibration"
    picture = Picture(name, f"Calibration of {goal}" if goal else "Calibration", caption)
    why = "no calibration_buckets were recorded (set evaluate.metrics)"
    found = _curves(styled, buckets, picture, why)
    if not found:
        return picture
    axes = picture.begin(4.4)
    values = np.concatenate([np.concatenate(curve[:2]) for *_, curve in found])
    low, high, locator = 0, values.max() * 1.05, partial(MaxNLocator, nbins=6)
    # On a linear scale the low probabilities would overlap.
    if values.min() > 0 and values.max() / values.min() > 20:
        axes.set(xscale="log", yscale="log")
        low, high = values.min() / 1.3, values.max() * 1.3
        # Few enough labels to be read side by side.
        locator = partial(LogLocator, subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,))
    axes.plot([low, high], [low, high], color="0.35", linestyle=(0, (1, 3)), label="calibrated")
    for one, style, curve in found:
        axes.plot(*curve[:2], **style, label=one.label)
    axes.set(xlabel="mean prediction", ylabel="mean label", aspect="equal")
    axes.set(xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(locator())
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:.3g}")
    return picture.finish()


def _name_rows(axes: Axes, names: Sequence[str], **looks: Any) -> None:
    axes.set_yticks(range(len(names)), names, **looks)
    as_written(axes.get_yticklabels())
    axes.invert_yaxis()


def _time_by_phase(runs: Sequence[RunRecord]) -> Picture:
    caption = (
        "Mean time of a step by phase, over all timed steps. The next batch is read and sent "
        "before the current one is computed. Evaluation and checkpoints are left out."
    )
    picture = Picture("time_by_phase", "Time by phase", caption)
    timed = {run.label: lines for run in runs if (lines := run.of_kind("timing"))}
    absent = [run.label for run in runs if run.label not in timed]
    picture.lacks(absent, "no steps were timed (set train.timing_every)")
    if not timed:
        return picture
    axes = picture.begin(1.1 + 0.34 * len(timed))
    left = np.zeros(len(timed))
    phases = dict.fromkeys(
        phase for lines in timed.values() for line in lines for phase in line["phase_seconds"]
    )
    for phase, (colour, hatch) in zip(phases, cycle(_FILLS), strict=False):
        widths = []
        for lines in timed.values():
            steps = [line["step_seconds"]["steps"] for line in lines]
            seconds = [line["phase_seconds"].get(phase, 0.0) for line in lines]
            widths.append(1e3 * np.average(seconds, weights=steps))
        axes.barh(
            range(len(timed)), widths, 0.7, left, color=colour, hatch=hatch, edgecolor="#555555",
            linewidth=0.5, label=phase,
        )  # fmt: skip
        left += widths
    _name_rows(axes, [shortened(label, 24) for label in timed])
    axes.set(xlabel="milliseconds of a step")
    return picture.finish()
