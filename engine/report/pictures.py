"""Pictures of the report. A curve is the mean over seeds, with a band from the lowest to the
highest; what runs did not record is left out and said."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullLocator, PercentFormatter

from stampede.engine.checkpoint import read_manifest
from stampede.engine.console import progress_bar
from stampede.engine.errors import RunFolderError
from stampede.engine.figures import as_written, show_small_differences
from stampede.engine.heartbeat import PHASES
from stampede.engine.report.run_records import RunRecord, Setting, readable, settings_of
from stampede.engine.report.tables import differing_keys
from stampede.engine.tables import read_field

# Inches: on a phone this shrinks to about 3.7, where its text is still as large as a footnote.
_WIDTH, _HEIGHT, _LEGEND_LINE = 5.4, 3.4, 0.19

# Characters of a label of which two stand side by side.
_NARROW = 22

# Dark to light alternates, so that neighbours differ in print, too (Okabe and Ito's colours).
_COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#8c3b73", "#7f7f7f")
_DASHES = ("-", "--", "-.", ":", (0, (7, 2, 1, 2, 1, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "x", "P")

_SAMPLES = "training samples (steps x batch size)"

# Above this ratio of the largest to the smallest probability the low ones would be one heap.
_WIDE = 20

# Fields whose norms are shown, and ids that are too few for shares or too many to be read.
_MOST_FIELDS, _FEWEST_IDS, _MOST_IDS = 16, 50, 20_000_000
# Settings whose norms can be told apart on one line.
_MOST_NORMS = 4

# A phase that takes less of the time of every run stands with the others.
_LEAST_PHASE, _OTHERS = 0.03, "other phases"
# Neighbours differ in brightness and in what fills them.
_FILLS = (
    ("#000000", ""), ("#e69f00", "//"), ("#0072b2", ""), ("#cccccc", ".."), ("#8c3b73", "xx"),
    ("#56b4e9", ""), ("#d55e00", "\\\\"), ("#f0e442", ""), ("#009e73", "--"), ("#ffffff", ""),
)  # fmt: skip

# Points of a run by step: where it is to the right, and its value.
_Points = dict[int, tuple[float, float]]


@dataclass(frozen=True)
class Drawing:
    """A picture, or why there is none.

    Attributes:
        name: of its file, without the ending.
        title: heading.
        caption: what is shown, in a sentence or two.
        figure: the picture; None where no run recorded what it needs.
        left_out: a sentence for each thing that is not shown, with the reason.
    """

    name: str
    title: str
    caption: str
    figure: Figure | None
    left_out: tuple[str, ...] = ()


def all_drawings(runs: Sequence[RunRecord], drawn: Sequence[RunRecord]) -> list[Drawing]:
    """Every picture of runs on the same data.

    Args:
        runs: all of them.
        drawn: those that single curves are drawn of.
    """
    curves = (
        draw_validation_auc, draw_test_auc, draw_loss, draw_wall_time, draw_calibration,
        draw_clipped, draw_by_count, draw_by_field, draw_embedding_norms,
    )  # fmt: skip
    settings = settings_of(drawn)
    drawings = [draw(settings) for draw in curves]
    drawings.insert(4, draw_batch_size(runs))
    return [*drawings, draw_phases(drawn)]


def draw_validation_auc(settings: Sequence[Setting]) -> Drawing:
    """AUC of the part that chooses the epoch."""
    return _draw_auc(settings, "validation")


def draw_test_auc(settings: Sequence[Setting]) -> Drawing:
    """AUC of the part that nothing should be chosen on."""
    return _draw_auc(settings, "test")


def _draw_auc(settings: Sequence[Setting], part: str) -> Drawing:
    name, title = f"auc_{part}", f"AUC on the {part} part"
    caption = f"Exact AUC of the {part} part at every evaluation."
    attainable = {
        line["attainable_auc"]
        for one in settings
        for run in one.runs
        for line in run.evaluations(part)[-1:]
        if line.get("attainable_auc") is not None
    }
    # A line would squeeze the curves beneath it.
    if len(attainable) == 1:
        caption += f" The true click probabilities would reach {attainable.pop():.4f}."

    def points(run: RunRecord) -> _Points:
        lines = [line for line in run.evaluations(part) if line["auc"] is not None]
        return {line["step"]: (run.samples_at(line), line["auc"]) for line in lines}

    return _draw_lines(
        settings, name, title, caption, points, f"no AUC of the {part} part was recorded",
        _SAMPLES, f"{part} AUC", is_auc=True,
    )  # fmt: skip


def draw_wall_time(settings: Sequence[Setting]) -> Drawing:
    """Test AUC over seconds of training."""
    caption = (
        "Test AUC over the seconds spent in training, without evaluation and checkpoints. Times of "
        "runs on different machines, or beside other work, do not compare."
    )

    def points(run: RunRecord) -> _Points:
        lines = [line for line in run.evaluations("test") if line["auc"] is not None]
        return {line["step"]: (line["train_seconds"], line["auc"]) for line in lines}

    return _draw_lines(
        settings, "auc_wall_time", "AUC against wall time", caption, points,
        "no AUC with its time of training was recorded", "seconds of training", "test AUC",
        is_auc=True,
    )  # fmt: skip


def draw_loss(settings: Sequence[Setting]) -> Drawing:
    """Loss of training and, with markers, of the validation part; else of the test part."""
    title = "Training and validation loss"
    found = [one for one in settings if any(_losses(run) for run in one.runs)]
    left_out = _not_shown(settings, found, "no training step was logged")
    caption = (
        "Loss of the global batches at the logged steps (thin, mean of neighbours) and logloss of "
        "the validation part at every evaluation (with markers; of the test part where there is no "
        "validation part). Where they part, the run learns its training rows by heart."
    )
    if not found:
        return Drawing("loss", title, caption, None, left_out)
    figure, axes = _new_figure()
    tops = []
    for one, style in _with_styles(settings):
        training = _mean_curve(one, _losses)
        if training is not None:
            x, y, *_ = training
            # A line for each batch would be a ribbon.
            size = -(-len(x) // 60)
            stretches = [slice(begin, begin + size) for begin in range(0, len(x), size)]
            x, y = ([part[s].mean() for s in stretches] for part in (x, y))
            axes.plot(x, y, **{**style, "marker": "", "linewidth": 0.8})
            tops.append(np.quantile(y, 0.9))
        evaluated = _mean_curve(one, _logloss)
        if evaluated is not None:
            tops.append(_add_curve(axes, evaluated, style, one.label).max())
        else:
            axes.plot([], [], **style, label=one.label)
    # The losses of the first steps would squeeze all others.
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.03 * max(tops)))
    axes.set(xlabel=_SAMPLES, ylabel="logloss")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _add_legend(figure)
    return Drawing("loss", title, caption, figure, left_out)


def _losses(run: RunRecord) -> _Points:
    lines = [line for line in run.of_kind("train") if line["loss"] is not None]
    return {line["step"]: (run.samples_at(line), line["loss"]) for line in lines}


def _logloss(run: RunRecord) -> _Points:
    lines = run.evaluations("validation") or run.evaluations("test")
    return {
        line["step"]: (run.samples_at(line), line["logloss"])
        for line in lines
        if line.get("logloss") is not None
    }


def draw_clipped(settings: Sequence[Setting]) -> Drawing:
    """Share of all rows of the batches so far that were clipped."""

    def points(run: RunRecord) -> _Points:
        return {
            line["step"]: (run.samples_at(line), line["clipped_share"])
            for line in run.of_kind("train")
            if line.get("clipped_share") is not None
        }

    caption = "Share of the rows in all batches up to then whose gradient was clipped."
    why = "no step was logged, or the tables' optimizer does not count clipped rows"
    drawing = _draw_lines(
        settings, "clipped", "Clipped rows", caption, points, why, _SAMPLES, "clipped so far"
    )
    if drawing.figure is not None:
        axes = drawing.figure.axes[0]
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_ylim(bottom=0)
    return drawing


def _draw_lines(
    settings: Sequence[Setting],
    name: str,
    title: str,
    caption: str,
    points: Callable[[RunRecord], _Points],
    why: str,
    xlabel: str,
    ylabel: str,
    is_auc: bool = False,
) -> Drawing:
    curves = [(one, style, _mean_curve(one, points)) for one, style in _with_styles(settings)]
    found = [(one, style, curve) for one, style, curve in curves if curve is not None]
    left_out = _not_shown(settings, [one for one, *_ in found], why)
    if not found:
        return Drawing(name, title, caption, None, left_out)
    figure, axes = _new_figure()
    for one, style, curve in found:
        _add_curve(axes, curve, style, one.label)
    if is_auc and show_small_differences(axes, [curve[1] for *_, curve in found]):
        caption += f" Points beneath {axes.get_ylim()[0]:.3f} are cut off."
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if xlabel == _SAMPLES:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _add_legend(figure)
    return Drawing(name, title, caption, figure, left_out)


def _mean_curve(
    one: Setting, points: Callable[[RunRecord], _Points]
) -> tuple[np.ndarray, ...] | None:
    """Over the seeds, at the steps that all of them have: x, mean, lowest and highest value."""
    found = [of_run for run in one.runs if (of_run := points(run))]
    steps = sorted(set.intersection(*map(set, found))) if found else []
    if not steps:
        return None
    values = np.array([[of_run[step] for step in steps] for of_run in found])
    x, y = values[..., 0], values[..., 1]
    return x.mean(0), y.mean(0), y.min(0), y.max(0)


def _add_curve(
    axes: Axes, curve: tuple[np.ndarray, ...], style: dict[str, Any], label: str
) -> np.ndarray:
    x, mean, low, high = curve
    # A marker for each of some ten points.
    axes.plot(x, mean, **style, markevery=max(1, len(x) // 10), label=label)
    if (high > low).any():
        axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
    return mean


def draw_batch_size(runs: Sequence[RunRecord]) -> Drawing:
    """AUC of the selected epoch by batch size, runs of one setting as a line."""
    name, title = "auc_batch_size", "AUC against batch size"
    ended = [run for run in runs if run.metric("test", "auc") is not None]
    chosen = sorted({run.summary["selected_on"] for run in ended})
    caption = (
        "Test AUC of the selected epoch, chosen on the "
        + " and the ".join(chosen)
        + " part: mean over the seeds, with the lowest and the highest. A line joins runs that "
        "differ only in seed, batch size and settings that go with the batch size."
    )
    left_out = _not_shown(settings_of(runs), settings_of(ended), "not finished or without an AUC")
    sizes = sorted({run.batch_size for run in ended})
    if len(sizes) < 2:
        found = f"all of {sizes[0]:,}" if sizes else "none finished"
        reason = f"It takes finished runs of two batch sizes or more; here: {found}."
        return Drawing(name, title, caption, None, (*left_out, reason))
    figure, axes = _new_figure()
    lines = _along_batch_size(ended)
    for (label, members), style in zip(lines.items(), styles(len(lines)), strict=True):
        by_size = defaultdict(list)
        for run in members:
            by_size[run.batch_size].append(run.metric("test", "auc"))
        x = sorted(by_size)
        mean = np.array([statistics.fmean(by_size[size]) for size in x])
        low, high = (np.array([of(by_size[size]) for size in x]) for of in (min, max))
        axes.errorbar(x, mean, [mean - low, high - mean], **style, capsize=3, label=label)
    axes.set(xlabel="global batch size", ylabel="test AUC", xscale="log")
    axes.set_xticks(sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if len(sizes) > 6:
        axes.tick_params("x", labelrotation=45)
    _add_legend(figure)
    return Drawing(name, title, caption, figure, left_out)


def _along_batch_size(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs by what they have in common besides batch size and seed."""
    sizes = {run.batch_size for run in runs}
    keys = []
    for key in differing_keys(runs):
        pairs = {(run.batch_size, readable(run.compared.get(key))) for run in runs}
        # A key with one value at each batch size, such as epochs, goes with it.
        if key not in ("train.batch_size", "run.seed") and len(pairs) > len(sizes):
            keys.append(key)
    found = defaultdict(list)
    for run in runs:
        found[tuple(readable(run.compared.get(key)) for key in keys)].append(run)
    # A label has the last part of a key, where that is clear enough.
    short = [key.rsplit(".", 1)[1] for key in keys]
    names = [s if short.count(s) == 1 else key for s, key in zip(short, keys, strict=True)]
    return {
        ", ".join(f"{n}={v}" for n, v in zip(names, values, strict=True) if v != "null")
        or ("others" if keys else "all runs"): members
        for values, members in found.items()
    }


def draw_calibration(settings: Sequence[Setting]) -> Drawing:
    """Mean label against mean prediction, in buckets of the predictions."""
    name, title = "calibration", "Calibration"
    caption = (
        "Share of clicks in ten buckets of equally many test samples, sorted by prediction, after "
        "the selected epoch (of runs that have not ended, at the newest evaluation). On the dotted "
        "line predictions are right; beneath it they are too high."
    )
    curves = [(one, style, _mean_curve(one, _buckets)) for one, style in _with_styles(settings)]
    found = [(one, style, curve) for one, style, curve in curves if curve is not None]
    why = "no calibration_buckets were recorded (evaluate.metrics asks for them)"
    left_out = _not_shown(settings, [one for one, *_ in found], why)
    if not found:
        return Drawing(name, title, caption, None, left_out)
    figure, axes = _new_figure(4.4)
    values = np.concatenate([np.concatenate(curve[:2]) for *_, curve in found])
    low, high = values.min(), values.max()
    if low > 0 and high / low > _WIDE:
        axes.set(xscale="log", yscale="log")
        low, high = low / 1.3, high * 1.3
    else:
        low, high = 0, high * 1.05
    axes.plot([low, high], [low, high], color="0.35", linestyle=(0, (1, 3)), label="calibrated")
    for one, style, curve in found:
        axes.plot(*curve[:2], **style, label=one.label)
    axes.set(xlabel="mean prediction", ylabel="mean label", aspect="equal")
    axes.set(xlim=(low, high), ylim=(low, high))
    _add_legend(figure)
    return Drawing(name, title, caption, figure, left_out)


def _buckets(run: RunRecord) -> _Points:
    buckets = run.metric("test", "calibration_buckets")
    if not run.summary:
        last = run.evaluations("test")[-1:]
        buckets = last[0].get("calibration_buckets") if last else None
    pairs = [(bucket["mean_prediction"], bucket["mean_label"]) for bucket in buckets or ()]
    return dict(enumerate(pairs))


def draw_by_count(settings: Sequence[Setting]) -> Drawing:
    """Clipped share of the rows by the occurrences of their id in the global batch."""

    def counts(line: dict[str, Any]) -> dict[str, Any]:
        return {_occurrences(count["from"]): count for count in line["counts"]}

    caption = (
        "Share of the ids of a batch whose gradient was clipped, by how often the id occurs in "
        "that global batch; over all steps that were counted."
    )
    title = "Clipped rows by frequency of the id"
    return _draw_shares(settings, "clipped_by_count", title, caption, counts, "occurrences")


def _occurrences(first: int) -> str:
    return "1" if first == 1 else f"{first}-{2 * first - 1}"


def draw_by_field(settings: Sequence[Setting]) -> Drawing:
    """Clipped share of the rows of each field in the steps that were counted."""
    caption = (
        "Share of the ids of a batch whose gradient was clipped, by field; over all steps that "
        "were counted."
    )
    lines = [line for one in settings for run in one.runs for line in run.of_kind("clipping")]
    several = sorted({field for line in lines for field in line["left_out"]})
    left_out = (f"Not counted, several ids in a sample: {_listed(several)}.",) if several else ()
    drawing = _draw_shares(
        settings, "clipped_by_field", "Clipped rows by field", caption,
        lambda line: line["fields"], "",
    )  # fmt: skip
    return replace(drawing, left_out=left_out + drawing.left_out)


def _draw_shares(
    settings: Sequence[Setting],
    name: str,
    title: str,
    caption: str,
    groups: Callable[[dict[str, Any]], dict[str, dict[str, int]]],
    xlabel: str,
) -> Drawing:
    shares: dict[str, dict[str, float]] = {}
    for one in settings:
        touched, clipped = Counter(), Counter()
        for run in one.runs:
            for line in run.of_kind("clipping"):
                for group, count in groups(line).items():
                    touched[group] += count["touched"]
                    clipped[group] += count["clipped"]
        if touched:
            shares[one.label] = {g: clipped[g] / n for g, n in touched.items() if n}
    found = [(one, style) for one, style in _with_styles(settings) if one.label in shares]
    why = "not counted (train.clip_stats_every asks for it)"
    left_out = _not_shown(settings, [one for one, _ in found], why)
    places = list(dict.fromkeys(group for of in shares.values() for group in of))
    if xlabel:
        places.sort(key=lambda text: int(text.partition("-")[0]))
    if not found:
        return Drawing(name, title, caption, None, left_out)
    figure, axes = _new_figure()
    for one, style in found:
        of = shares[one.label]
        x = [place for place, group in enumerate(places) if group in of]
        # Fields have no order that a line could follow.
        line = {} if xlabel else {"linestyle": "none"}
        axes.plot(x, [of[places[place]] for place in x], **{**style, **line}, label=one.label)
    axes.set_xticks(range(len(places)), places, rotation=90 if len(places) > 8 else 0, fontsize=8)
    as_written(axes.get_xticklabels())
    axes.set(xlabel=xlabel, ylabel="clipped")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(bottom=0)
    _add_legend(figure)
    return Drawing(name, title, caption, figure, left_out)


def draw_embedding_norms(settings: Sequence[Setting]) -> Drawing:
    """Median and spread of the norms of the embeddings, a line for each field."""
    name, title = "embedding_norms", "Norms of the embeddings"
    caption = (
        "Norms of a field's embeddings in the checkpoint of the selected epoch: the median, and a "
        "line from the 5th to the 95th percentile. Ids that training never met keep their initial "
        "norm, or decay by L2."
    )
    sizes: dict[str, int] = {}
    found, damaged = [], ()
    absent = list(settings)
    for one, style in list(_with_styles(settings))[:_MOST_NORMS]:
        try:
            path = one.runs[0].checkpoint()
            if path is not None:
                of_run = read_manifest(path).data.vocabulary_sizes
                sizes |= {field: max(ids, sizes.get(field, 0)) for field, ids in of_run.items()}
                found.append((one, style, path))
                absent.remove(one)
        except RunFolderError as failure:
            damaged += (f"{one.label} is not shown: {failure}.",)
            absent.remove(one)
    left_out = _not_shown(
        settings, [one for one in settings if one not in absent],
        f"no checkpoint in the run folder, or not among the first {_MOST_NORMS}",
    )  # fmt: skip
    fields = [field for field, ids in sizes.items() if _FEWEST_IDS <= ids <= _MOST_IDS]
    others = [field for field in sizes if field not in fields]
    if others:
        limits = f"fewer than {_FEWEST_IDS} ids or more than {_MOST_IDS:,}"
        left_out += (f"Not shown, {limits}: {_listed(others)}.",)
    if len(fields) > _MOST_FIELDS:
        left_out += (f"Of {len(fields)} fields, the {_MOST_FIELDS} with the most ids are shown.",)
        largest = sorted(fields, key=lambda field: -sizes[field])[:_MOST_FIELDS]
        fields = [field for field in fields if field in largest]
    norms, shown = {}, []
    with progress_bar(len(found) * len(fields), 0, True, "reading tables", "tables", 5.0) as bar:
        for one, style, path in found:
            try:
                norms[one.label] = [_percentiles(path, field, bar) for field in fields]
                shown.append((one, style))
            except RunFolderError as failure:
                damaged += (f"{one.label} is not shown: {failure}.",)
    left_out += damaged
    if not shown or not fields:
        return Drawing(name, title, caption, None, left_out)
    figure, axes = _new_figure(1.0 + 0.17 * len(fields))
    for number, (one, style) in enumerate(shown):
        # Lines of several settings stand beneath each other.
        y = np.arange(len(fields)) + 0.6 * ((number + 0.5) / len(shown) - 0.5)
        low, middle, high = np.array(norms[one.label]).T
        axes.hlines(y, low, high, color=style["color"], linewidth=1.2)
        axes.plot(middle, y, **{**style, "linestyle": "none"}, label=one.label)
    axes.set_yticks(range(len(fields)), [_shortened(f"{f} ({sizes[f]:,})", 26) for f in fields],
                    fontsize=8)  # fmt: skip
    as_written(axes.get_yticklabels())
    axes.invert_yaxis()
    axes.set(xlabel="norm of the embedding", ylabel="field (ids)", xscale="log")
    _add_legend(figure)
    return Drawing(name, title, caption, figure, left_out)


def _percentiles(checkpoint: Any, field: str, bar: Any) -> np.ndarray:
    norms = read_field(checkpoint, field).embedding.norm(dim=1).numpy()
    if not np.isfinite(norms).all():
        raise RunFolderError(f"{checkpoint}: field {field!r} holds weights that are not finite")
    bar.update()
    return np.maximum(np.percentile(norms, (5, 50, 95)), 1e-8)


def draw_phases(runs: Sequence[RunRecord]) -> Drawing:
    """Milliseconds of a step by phase, a bar for each run."""
    name, title = "time_by_phase", "Time by phase"
    caption = (
        "Mean time of a step by what the ranks did in it, over all steps that were timed. The next "
        "batch is read and sent while the one before waits to be computed. Evaluation and "
        "checkpoints are left out."
    )
    found = [(run, seconds) for run in runs if (seconds := _phase_seconds(run))]
    timed = [run for run, _ in found]
    absent = [run.label for run in runs if run not in timed]
    why = "no steps were timed (train.timing_every asks for it)"
    left_out = (f"Not shown, {why}: {_listed(absent)}.",) if absent else ()
    if not found:
        return Drawing(name, title, caption, None, left_out)
    shown = [
        phase
        for phase in PHASES
        if any(seconds[phase] >= _LEAST_PHASE * sum(seconds.values()) for _, seconds in found)
    ]
    figure, axes = _new_figure(1.1 + 0.34 * len(found))
    left = np.zeros(len(found))
    for phase, (colour, hatch) in zip([*shown, _OTHERS], cycle(_FILLS), strict=False):
        of_phase = [p for p in PHASES if p not in shown] if phase == _OTHERS else [phase]
        widths = [1e3 * sum(seconds[one] for one in of_phase) for _, seconds in found]
        axes.barh(
            range(len(found)), widths, 0.7, left, color=colour, hatch=hatch, edgecolor="#555555",
            linewidth=0.5, label=phase,
        )  # fmt: skip
        left += widths
    axes.set_yticks(range(len(found)), [_shortened(run.label, 24) for run, _ in found])
    as_written(axes.get_yticklabels())
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds of a step")
    _add_legend(figure)
    return Drawing(name, title, caption, figure, left_out)


def _phase_seconds(run: RunRecord) -> dict[str, float]:
    """Mean seconds of a step by phase; empty where none was timed."""
    lines = run.of_kind("timing")
    steps = sum(line["step_seconds"]["steps"] for line in lines)
    return {
        phase: sum(
            line["step_seconds"]["steps"] * line["phase_seconds"].get(phase, 0.0) for line in lines
        )
        / steps
        for phase in PHASES
        if steps
    }


def styles(count: int) -> list[dict[str, Any]]:
    """Colour, dashes and marker for so many curves; 210 of them differ."""
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


def _with_styles(settings: Sequence[Setting]) -> list[tuple[Setting, dict[str, Any]]]:
    """Settings with their looks, which are the same in every picture."""
    return list(zip(settings, styles(len(settings)), strict=True))


def _new_figure(height: float = _HEIGHT) -> tuple[Figure, Axes]:
    """A figure with axes, in inches; `_add_legend` makes room for the legend."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _add_legend(figure: Figure) -> None:
    """A legend beneath the picture, where it hides nothing."""
    handles = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    shown = [_shortened(label) for label in handles]
    columns = 2 if len(shown) > 3 and max(map(len, shown)) <= _NARROW else 1
    lines = -(-len(shown) // columns)
    figure.set_figheight(figure.get_figheight() + lines * _LEGEND_LINE)
    legend = figure.legend(
        list(handles.values()), shown, loc="outside lower center", ncols=columns, frameon=False,
        handlelength=4, fontsize=9,
    )  # fmt: skip
    as_written(legend.get_texts())


def _not_shown(settings: Sequence[Setting], shown: Sequence[Setting], why: str) -> tuple[str, ...]:
    """The sentence on runs that a picture lacks, if there are any."""
    there = {run.path for one in shown for run in one.runs}
    absent = [one.label for one in settings if not any(run.path in there for run in one.runs)]
    return (f"Not shown, {why}: {_listed(absent)}.",) if absent else ()


def _shortened(text: str, most: int = 56) -> str:
    """A long name without its middle."""
    if len(text) <= most:
        return text
    half = (most - 2) // 2
    return f"{text[:half]}..{text[-half:]}"


def _listed(names: Sequence[str]) -> str:
    """Some names, as in a sentence."""
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
