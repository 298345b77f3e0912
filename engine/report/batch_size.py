"""AUC against batch size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

from matplotlib.ticker import FuncFormatter, NullLocator

from stampede.engine.report.differences import differing_keys, readable
from stampede.engine.report.drawing import Drawing, add_legend, new_figure, not_shown, styles
from stampede.engine.report.run_records import RunRecord

# Runs that differ in these only are points of one line.
_ALONG, _REPEATS = "train.batch_size", "run.seed"


def draw_batch_size(runs: Sequence[RunRecord]) -> Drawing:
    """Best test AUC of finished runs by batch size, runs of one setting as a line."""
    name, title = "auc_batch_size", "AUC against batch size"
    ended = [run for run in runs if run.summary.get("best_auc") is not None]
    chosen = sorted({run.summary["selected_on"] for run in ended})
    caption = (
        "Test AUC of the best epoch, chosen on the "
        + " and the ".join(chosen)
        + " part. A point is a run; a line joins the means of runs that differ only in seed, batch "
        "size and settings that go with the batch size."
    )
    left_out = not_shown(runs, ended, "not finished or without a best AUC")
    sizes = sorted({run.batch_size for run in ended})
    if len(sizes) < 2:
        found = f"all of {sizes[0]:,}" if sizes else "none finished"
        reason = f"It takes finished runs of two batch sizes or more; here: {found}."
        return Drawing(name, title, caption, None, (*left_out, reason))
    settings = _settings(ended)
    figure = new_figure()
    axes = figure.subplots()
    for (label, members), style in zip(settings.items(), styles(len(settings)), strict=True):
        by_size = defaultdict(list)
        for run in members:
            by_size[run.batch_size].append(run.summary["best_auc"])
        means = sorted((size, mean(aucs)) for size, aucs in by_size.items())
        points = {**style, "linestyle": "none"}
        axes.plot(*zip(*means, strict=True), **{**style, "marker": ""})
        axes.plot([r.batch_size for r in members], [r.summary["best_auc"] for r in members],
                  **points)  # fmt: skip
        axes.plot([], [], **style, label=label)
    axes.set(xlabel="global batch size", ylabel="best test AUC", xscale="log")
    axes.set_xticks(sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if len(sizes) > 6:
        axes.tick_params("x", labelrotation=45)
    axes.grid(alpha=0.3)
    add_legend(figure)
    return Drawing(name, title, caption, figure, left_out)


def _settings(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs by what they have in common besides batch size and seed."""
    sizes = {run.batch_size for run in runs}
    keys = []
    for key in differing_keys(runs):
        pairs = {(run.batch_size, readable(run.compared.get(key))) for run in runs}
        # A key with one value at each batch size, such as epochs, goes with it.
        if key not in (_ALONG, _REPEATS) and len(pairs) > len(sizes):
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
