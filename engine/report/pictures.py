"""Pictures of the report.

A curve is the mean over seeds, with a band from the lowest to the highest. Each picture says what
it lacks because runs did not record it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter, NullLocator

from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.console import progress_bar
from stampede.engine.errors import RunFolderError
from stampede.engine.heartbeat import PHASES
from stampede.engine.plots import as_written, show_small_differences
from stampede.engine.report.drawing import (
    Drawing,
    Points,
    Style,
    add_curve,
    as_shares,
    curves,
    listed,
    name_rows,
    new_figure,
    not_shown,
    shortened,
    styles,
    with_legend,
    with_styles,
)
from stampede.engine.report.run_records import (
    RunRecord,
    Setting,
    differing_keys,
    readable,
    settings_of,
)
from stampede.engine.tables import read_field

_SAMPLES = "training samples (steps x batch size)"

# Most fields whose norms are shown; fewest ids for percentiles, and most ids to read.
_MOST_FIELDS, _FEWEST_IDS, _MOST_IDS = 16, 50, 20_000_000
# Settings whose norms can be told apart on one line.
_MOST_NORMS = 4

# Phases with a smaller share of every run's time are joined.
_LEAST_PHASE, _OTHERS = 0.03, "other phases"
# Neighbours differ in brightness and hatching.
_FILLS = (
    ("#000000", ""), ("#e69f00", "//"), ("#0072b2", ""), ("#cccccc", ".."), ("#8c3b73", "xx"),
    ("#56b4e9", ""), ("#d55e00", "\\\\"), ("#f0e442", ""), ("#009e73", "--"), ("#ffffff", ""),
)  # fmt: skip


def all_drawings(runs: Sequence[RunRecord], drawn: Sequence[RunRecord]) -> list[Drawing]:
    """Every picture of runs on the same data.

    Args:
        runs: all of them.
        drawn: the runs that get curves.
    """
    settings = settings_of(drawn)
    return [
        *draw_periods(settings),
        draw_auc(settings, "validation"),
        draw_auc(settings, "test"),
        draw_loss(settings),
        draw_wall_time(settings),
        draw_batch_size(runs),
        draw_calibration(settings),
        draw_clipped(settings),
        draw_by_count(settings),
        draw_by_field(settings),
        draw_embedding_norms(settings),
        draw_phases(drawn),
    ]


def draw_periods(settings: Sequence[Setting]) -> list[Drawing]:
    """AUC of a log's periods, for all rows and for rows with new ids; rows of tables."""
    shown = {
        "auc": ("AUC of each period", "Exact AUC of each period before it was trained on."),
        "new_ids_auc": (
            "AUC of rows with new ids",
            "The same for rows with an id that the model did not know.",
        ),
        "ids": ("Rows of all tables", "Ids with their own row after each period."),
    }

    def points(run: RunRecord, name: str) -> Points:
        # An untrained model scores the first period.
        lines = [line for line in run.periods if name == "ids" or line["period"] > 1]
        return _points(lines, name, itemgetter("period"), at="period")

    # If no run has periods, do not list the runs as missing.
    settings = [one for one in settings if any(run.periods for run in one.runs)] and settings
    return [
        _draw_lines(
            settings,
            Drawing(f"periods_{name}", title, caption),
            partial(points, name=name),
            "there is no such period",
            "period",
            title,
            is_auc=name != "ids",
        )
        for name, (title, caption) in shown.items()
    ]


def draw_auc(settings: Sequence[Setting], part: str) -> Drawing:
    """AUC of a part over the samples."""
    caption = f"Exact AUC of the {part} part at every evaluation."
    last = [line for one in settings for run in one.runs for line in run.evaluations(part)[-1:]]
    attainable = {line["attainable_auc"] for line in last if line.get("attainable_auc") is not None}
    # Not as a line, which would squeeze the curves below it.
    if len(attainable) == 1:
        caption += f" The true click probabilities would reach {attainable.pop():.4f}."
    return _draw_lines(
        settings,
        Drawing(f"auc_{part}", f"AUC on the {part} part", caption),
        lambda run: _points(run.evaluations(part), "auc", run.samples_at),
        f"no AUC of the {part} part was recorded",
        _SAMPLES,
        f"{part} AUC",
        is_auc=True,
    )


def draw_wall_time(settings: Sequence[Setting]) -> Drawing:
    """Test AUC over seconds of training."""
    caption = (
        "Test AUC over the seconds spent in training, without evaluation and checkpoints. Times "
        "of runs on different or busy machines cannot be compared."
    )

    return _draw_lines(
        settings,
        Drawing("auc_wall_time", "AUC against wall time", caption),
        lambda run: _points(run.evaluations("test"), "auc", itemgetter("train_seconds")),
        "no AUC with its training time was recorded",
        "seconds of training",
        "test AUC",
        is_auc=True,
    )


def draw_clipped(settings: Sequence[Setting]) -> Drawing:
    """Share of all rows of the batches so far that were clipped."""
    caption = "Share of the rows in all batches up to then whose gradient was clipped."
    drawing = _draw_lines(
        settings,
        Drawing("clipped", "Clipped rows", caption),
        lambda run: _points(run.of_kind("train"), "clipped_share", run.samples_at),
        "no step was logged, or the tables' optimizer does not count clipped rows",
        _SAMPLES,
        "clipped so far",
    )
    if drawing.figure is not None:
        as_shares(drawing.figure.axes[0])
    return drawing


def _draw_lines(
    settings: Sequence[Setting],
    drawing: Drawing,
    points: Callable[[RunRecord], Points],
    why: str,
    xlabel: str,
    ylabel: str,
    is_auc: bool = False,
) -> Drawing:
    """A curve for each setting with points; `why` says why others have none."""
    found = curves(settings, points)
    drawing = replace(drawing, left_out=not_shown(settings, [one for one, *_ in found], why))
    if not found:
        return drawing
    figure, axes = new_figure()
    for one, style, curve in found:
        add_curve(axes, curve, style, one.label)
    caption = drawing.caption
    if is_auc and show_small_differences(axes, [curve[1] for *_, curve in found]):
        caption += f" Points below {axes.get_ylim()[0]:.3f} are cut off."
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if xlabel == _SAMPLES:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return replace(drawing, caption=caption, figure=with_legend(figure))


def draw_loss(settings: Sequence[Setting]) -> Drawing:
    """Training loss, and with markers the loss of the validation part, or else the test part."""
    caption = (
        "Loss of the global batches at the logged steps (thin, mean of neighbours) and logloss of "
        "the validation part at every evaluation (with markers; of the test part if there is no "
        "validation part). Where the curves part, the run overfits."
    )
    trained = curves(settings, lambda run: _points(run.of_kind("train"), "loss", run.samples_at))
    shown = [one for one, *_ in trained]
    left_out = not_shown(settings, shown, "no training step was logged")
    drawing = Drawing("loss", "Training and validation loss", caption, None, left_out)
    if not trained:
        return drawing

    def held_out(run: RunRecord) -> Points:
        lines = run.evaluations("validation") or run.evaluations("test")
        return _points(lines, "logloss", run.samples_at)

    evaluated = {one.label: curve for one, _, curve in curves(settings, held_out)}
    figure, axes = new_figure()
    tops = []
    for one, style, (x, y, *_) in trained:
        # Average neighbours: the loss of every batch would be a wide band.
        size = -(-len(x) // 60)
        stretches = [slice(begin, begin + size) for begin in range(0, len(x), size)]
        x, y = ([part[s].mean() for s in stretches] for part in (x, y))
        axes.plot(x, y, **{**style, "marker": "", "linewidth": 0.8})
        tops.append(np.quantile(y, 0.9))
        if one.label in evaluated:
            add_curve(axes, evaluated[one.label], style, one.label)
            tops.append(evaluated[one.label][1].max())
        else:
            axes.plot([], [], **style, label=one.label)
    # Cut off the first steps, whose losses would squeeze all others.
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.03 * max(tops)))
    axes.set(xlabel=_SAMPLES, ylabel="logloss")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return replace(drawing, figure=with_legend(figure))


def _points(
    lines: Sequence[dict[str, Any]],
    key: str,
    x: Callable[[dict[str, Any]], float],
    at: str = "step",
) -> Points:
    """The values of `key` in the lines that have it, by step or by another key `at`."""
    return {line[at]: (x(line), line[key]) for line in lines if line.get(key) is not None}


def draw_batch_size(runs: Sequence[RunRecord]) -> Drawing:
    """AUC of the selected epoch by batch size, runs of one setting as a line."""
    ended = [run for run in runs if run.metric("test", "auc") is not None]
    chosen = sorted({run.summary["selected_on"] for run in ended})
    caption = (
        "Test AUC of the selected epoch, chosen on the "
        + " and the ".join(chosen)
        + " part: mean over the seeds, with the lowest and the highest. A line joins runs that "
        "differ only in seed, batch size and settings that follow the batch size."
    )
    left_out = not_shown(settings_of(runs), settings_of(ended), "not finished or without an AUC")
    drawing = Drawing("auc_batch_size", "AUC against batch size", caption, None, left_out)
    sizes = sorted({run.batch_size for run in ended})
    if len(sizes) < 2:
        reason = "Finished runs of at least two batch sizes are needed."
        return replace(drawing, left_out=(*left_out, reason))
    figure, axes = new_figure()
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
    return replace(drawing, figure=with_legend(figure))


def _along_batch_size(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group runs that differ only in batch size and seed."""
    sizes = {run.batch_size for run in runs}
    # A key with one value per batch size, such as epochs, follows the batch size.
    keys = [
        key
        for key in differing_keys(runs)
        if len({(run.batch_size, readable(run.compared.get(key))) for run in runs}) > len(sizes)
        and key != "run.seed"
    ]
    found = defaultdict(list)
    for run in runs:
        found[tuple(readable(run.compared.get(key)) for key in keys)].append(run)
    # Labels use the last part of a key if that is unambiguous.
    short = [key.rsplit(".", 1)[1] for key in keys]
    names = [s if short.count(s) == 1 else key for s, key in zip(short, keys, strict=True)]
    return {
        ", ".join(f"{n}={v}" for n, v in zip(names, values, strict=True) if v != "null")
        or ("others" if keys else "all runs"): members
        for values, members in found.items()
    }


def draw_calibration(settings: Sequence[Setting]) -> Drawing:
    """Mean label against mean prediction, in buckets of the predictions."""
    caption = (
        "Share of clicks in ten buckets of equally many test samples, sorted by prediction, after "
        "the selected epoch (for unfinished runs, at the newest evaluation). On the dotted line "
        "predictions are right; below it they are too high."
    )
    found = curves(settings, _buckets)
    why = "no calibration_buckets were recorded (set evaluate.metrics)"
    left_out = not_shown(settings, [one for one, *_ in found], why)
    drawing = Drawing("calibration", "Calibration", caption, None, left_out)
    if not found:
        return drawing
    figure, axes = new_figure(4.4)
    values = np.concatenate([np.concatenate(curve[:2]) for *_, curve in found])
    low, high = 0, values.max() * 1.05
    # On a linear scale the low probabilities would overlap.
    if values.min() > 0 and values.max() / values.min() > 20:
        axes.set(xscale="log", yscale="log")
        low, high = values.min() / 1.3, values.max() * 1.3
    axes.plot([low, high], [low, high], color="0.35", linestyle=(0, (1, 3)), label="calibrated")
    for one, style, curve in found:
        axes.plot(*curve[:2], **style, label=one.label)
    axes.set(xlabel="mean prediction", ylabel="mean label", aspect="equal")
    axes.set(xlim=(low, high), ylim=(low, high))
    return replace(drawing, figure=with_legend(figure))


def _buckets(run: RunRecord) -> Points:
    buckets = run.metric("test", "calibration_buckets")
    if not run.summary and run.evaluations("test"):
        buckets = run.evaluations("test")[-1].get("calibration_buckets")
    pairs = [(bucket["mean_prediction"], bucket["mean_label"]) for bucket in buckets or ()]
    return dict(enumerate(pairs))


def draw_by_count(settings: Sequence[Setting]) -> Drawing:
    """Clipped share of the rows by the occurrences of their id in the global batch."""
    caption = (
        "Share of the ids of a batch whose gradient was clipped, by how often the id occurs in "
        "that global batch, over all counted steps."
    )

    def groups(line: dict[str, Any]) -> dict[str, Any]:
        firsts = {count["from"]: count for count in line["counts"]}
        return {"1" if n == 1 else f"{n}-{2 * n - 1}": count for n, count in firsts.items()}

    drawing = Drawing("clipped_by_count", "Clipped rows by frequency of the id", caption)
    return _draw_shares(settings, drawing, groups, "occurrences")


def draw_by_field(settings: Sequence[Setting]) -> Drawing:
    """Clipped share of each field's rows, over all counted steps."""
    caption = (
        "Share of the ids of a batch whose gradient was clipped, by field, over all counted steps."
    )
    lines = [line for one in settings for run in one.runs for line in run.of_kind("clipping")]
    several = sorted({field for line in lines for field in line["left_out"]})
    left_out = (f"Not counted, samples have several ids: {listed(several)}.",) if several else ()
    drawing = Drawing("clipped_by_field", "Clipped rows by field", caption, None, left_out)
    return _draw_shares(settings, drawing, lambda line: line["fields"], "")


def _draw_shares(
    settings: Sequence[Setting],
    drawing: Drawing,
    groups: Callable[[dict[str, Any]], dict[str, dict[str, int]]],
    xlabel: str,
) -> Drawing:
    found: list[tuple[Setting, Style, dict[str, float]]] = []
    for one, style in with_styles(settings):
        touched, clipped = Counter(), Counter()
        for line in (line for run in one.runs for line in run.of_kind("clipping")):
            for group, count in groups(line).items():
                touched[group] += count["touched"]
                clipped[group] += count["clipped"]
        if touched:
            found.append((one, style, {g: clipped[g] / n for g, n in touched.items() if n}))
    why = "not counted (set train.clip_stats_every)"
    left_out = not_shown(settings, [one for one, *_ in found], why)
    drawing = replace(drawing, left_out=drawing.left_out + left_out)
    if not found:
        return drawing
    places = list(dict.fromkeys(group for *_, shares in found for group in shares))
    if xlabel:
        places.sort(key=lambda text: int(text.partition("-")[0]))
    figure, axes = new_figure()
    for one, style, shares in found:
        x = [place for place, group in enumerate(places) if group in shares]
        # Fields have no order, so draw no line.
        line = {} if xlabel else {"linestyle": "none"}
        axes.plot(x, [shares[places[place]] for place in x], **{**style, **line}, label=one.label)
    axes.set_xticks(range(len(places)), places, rotation=90 if len(places) > 8 else 0, fontsize=8)
    as_written(axes.get_xticklabels())
    axes.set(xlabel=xlabel, ylabel="clipped")
    as_shares(axes)
    return replace(drawing, figure=with_legend(figure))


def draw_embedding_norms(settings: Sequence[Setting]) -> Drawing:
    """Median and spread of the norms of the embeddings, a line for each field."""
    caption = (
        "Norms of a field's embeddings in the checkpoint of the selected epoch: the median, and a "
        "line from the 5th to the 95th percentile. Ids outside the training rows keep their "
        "initial norm, or decay by L2."
    )
    norms: list[tuple[Setting, Style, np.ndarray]] = []
    # By the first checkpoint: runs on the same data have the same fields.
    sizes: dict[str, int] = {}
    fields: list[str] = []
    damaged: dict[str, str] = {}
    with progress_bar(None, 0, True, "reading tables", "tables", 5.0) as bar:
        for one, style in with_styles(settings)[:_MOST_NORMS]:
            try:
                path = one.runs[0].checkpoint()
                if path is not None:
                    sizes = sizes or read_manifest(path).data.vocabulary_sizes
                    fields = [f for f, ids in sizes.items() if _FEWEST_IDS <= ids <= _MOST_IDS]
                    largest = sorted(fields, key=lambda f: -sizes[f])[:_MOST_FIELDS]
                    shown = [field for field in fields if field in largest]
                    found = [_percentiles(path, field, bar) for field in shown]
                    norms.append((one, style, np.array(found)))
            except RunFolderError as failure:
                damaged[one.label] = f"{one.label} is not shown: {failure}."
    known = [one for one, *_ in norms] + [one for one in settings if one.label in damaged]
    why = f"no checkpoint in the run folder, or not among the first {_MOST_NORMS}"
    left_out = not_shown(settings, known, why)
    others = [field for field in sizes if field not in fields]
    if others:
        limits = f"fewer than {_FEWEST_IDS} ids or more than {_MOST_IDS:,}"
        left_out += (f"Not shown, {limits}: {listed(others)}.",)
    if len(fields) > _MOST_FIELDS:
        left_out += (f"Of {len(fields)} fields, the {_MOST_FIELDS} with the most ids are shown.",)
    left_out += tuple(damaged.values())
    drawing = Drawing("embedding_norms", "Norms of the embeddings", caption, None, left_out)
    if not norms or not fields:
        return drawing
    figure, axes = new_figure(1.0 + 0.17 * len(shown))
    for number, (one, style, percentiles) in enumerate(norms):
        # Draw the lines of several settings below one another.
        y = np.arange(len(shown)) + 0.6 * ((number + 0.5) / len(norms) - 0.5)
        low, middle, high = percentiles.T
        axes.hlines(y, low, high, color=style["color"], linewidth=1.2)
        axes.plot(middle, y, **{**style, "linestyle": "none"}, label=one.label)
    name_rows(axes, [shortened(f"{f} ({sizes[f]:,})", 26) for f in shown], fontsize=8)
    axes.set(xlabel="norm of the embedding", ylabel="field (ids)", xscale="log")
    return replace(drawing, figure=with_legend(figure))


def _percentiles(checkpoint: Path, field: str, bar: Any) -> np.ndarray:
    norms = read_field(checkpoint, field).embedding.norm(dim=1).numpy()
    if not np.isfinite(norms).all():
        raise RunFolderError(f"{checkpoint}: field {field!r} holds weights that are not finite")
    bar.update()
    return np.maximum(np.percentile(norms, (5, 50, 95)), 1e-8)


def draw_phases(runs: Sequence[RunRecord]) -> Drawing:
    """Milliseconds of a step by phase, a bar for each run."""
    caption = (
        "Mean time of a step by phase, over all timed steps. The next batch is read and sent "
        "before the current one is computed. Evaluation and checkpoints are left out."
    )
    found = [(run, seconds) for run in runs if (seconds := _phase_seconds(run))]
    every, timed = [Setting(r.label, (r,)) for r in runs], [Setting("", (r,)) for r, _ in found]
    left_out = not_shown(every, timed, "no steps were timed (set train.timing_every)")
    drawing = Drawing("time_by_phase", "Time by phase", caption, None, left_out)
    if not found:
        return drawing
    shown = [
        phase
        for phase in PHASES
        if any(seconds[phase] >= _LEAST_PHASE * sum(seconds.values()) for _, seconds in found)
    ]
    figure, axes = new_figure(1.1 + 0.34 * len(found))
    left = np.zeros(len(found))
    for phase, (colour, hatch) in zip([*shown, _OTHERS], cycle(_FILLS), strict=False):
        of_phase = [p for p in PHASES if p not in shown] if phase == _OTHERS else [phase]
        widths = [1e3 * sum(seconds[one] for one in of_phase) for _, seconds in found]
        axes.barh(
            range(len(found)), widths, 0.7, left, color=colour, hatch=hatch, edgecolor="#555555",
            linewidth=0.5, label=phase,
        )  # fmt: skip
        left += widths
    name_rows(axes, [shortened(run.label, 24) for run, _ in found])
    axes.set(xlabel="milliseconds of a step")
    return replace(drawing, figure=with_legend(figure))


def _phase_seconds(run: RunRecord) -> dict[str, float]:
    """Mean seconds of a step by phase; empty if none was timed."""
    lines = run.of_kind("timing")
    steps = [line["step_seconds"]["steps"] for line in lines]
    return {
        phase: np.average([line["phase_seconds"].get(phase, 0.0) for line in lines], weights=steps)
        for phase in PHASES
        if lines
    }
