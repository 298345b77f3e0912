"""Results as tables: CSV for programs, Markdown for people."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence

from stampede.engine.summary import METRICS
from stampede.engine.sweeps.data_line import what_data
from stampede.engine.sweeps.points import values_of
from stampede.engine.sweeps.results import Mean, Result, columns
from stampede.engine.sweeps.sections import shown_as
from stampede.engine.sweeps.sweep import Sweep

_WIDTH = 100
# Digits after the point; 4 where none is given.
_DIGITS = {"train_seconds": 1, "best_epoch": 1, "steps": 0, "samples_per_second": 0}
_HOW = {
    "validation": "the epoch that was best on the validation part",
    "test": "the best epoch, chosen on the test part itself (evaluate.select_on=test): optimistic",
}


def to_csv(sweep: Sweep, found: Sequence[Result]) -> str:
    """A line for every point, numbers in full."""
    axes = axes_of(found)
    # All metrics that were computed, whatever the Markdown shows.
    computed = [m for m in METRICS if any(m in o.summary for one in found for o in one.done)]
    shown = columns(dict.fromkeys([*sweep.section.report.metrics, *computed]), found)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    sought = [f"{sweep.study.metric}_sought", "sought_stderr"] if sweep.study else []
    measured = [f"{column.name}_{which}" for column in shown for which in ("mean", "stderr")]
    published = ["auc_published"] if sweep.published else []
    writer.writerow([*axes, *sought, *measured, "seeds", "failed", "selected_on", *published])
    for one in found:
        # Labels of a study are rounded.
        cells = values_of(one.point) if sweep.study else list(one.point.labels.values())
        if sweep.study:
            cells += _both(one.sought)
        for column in shown:
            cells += _both(one.mean(column))
        cells += [len(one.done), len(one.outcomes) - len(one.done), one.selected_on]
        writer.writerow([*cells, *([one.published] if sweep.published else [])])
    return text.getvalue()


def to_markdown(sweep: Sweep, found: Sequence[Result]) -> str:
    """The table, how its figures were chosen, and what failed."""
    cells = [(axis, [one.point.labels[axis] for one in found]) for axis in axes_of(found)]
    parts = sorted({one.selected_on for one in found if one.done})
    if sweep.study:
        head = f"{shown_as(sweep.study.metric)}, selecting part"
        cells.append((head, [_shown(one.sought, sweep.study.metric) for one in found]))
    cells += [
        (column.title, [_shown(one.mean(column), column.metric) for one in found])
        for column in columns(sweep.section.report.metrics, found)
    ]
    cells.append(("seeds", [_seeds(one) for one in found]))
    if len(parts) > 1:
        cells.append(("selected on", [one.selected_on for one in found]))
    if sweep.published:
        shown = ["" if one.published is None else f"{one.published:.4f}" for one in found]
        cells.append(("published test AUC", shown))
    paragraphs = [f"# {sweep.folder.name}"]
    data = what_data(sweep, found)
    paragraphs += [_wrapped(text) for text in (data, _how(parts, sweep)) if text]
    paragraphs.append(_aligned(cells))
    if sweep.published:
        paragraphs.append(_wrapped(f"Published AUC: {sweep.published.source}."))
    failed = [outcome for one in found for outcome in one.outcomes if outcome.message]
    if failed:
        lines = [_wrapped(f"- `{one.trial.name}`: {one.message}") for one in failed]
        again = "" if sweep.study else " (`--retry-failed` runs them again)"
        paragraphs.append(f"Failed{again}:\n\n" + "\n".join(lines))
    return "\n\n".join(paragraphs) + "\n"


def axes_of(found: Sequence[Result]) -> list[str]:
    """What the points differ in."""
    return list(found[0].point.labels) if found else []


def _how(parts: Sequence[str], sweep: Sweep) -> str:
    chosen = "; ".join(_HOW.get(part, part) for part in parts) or "no trial was finished"
    several = ", mean ± standard error over the seeds" if len(sweep.seeds) > 1 else ""
    return f"Figures at {chosen}{several}; `last`: after the last epoch, for comparison."


def _both(found: Mean | None) -> list[float | None]:
    return [None, None] if found is None else [found.value, found.error]


def _shown(found: Mean | None, metric: str) -> str:
    if found is None:
        return ""
    digits = _DIGITS.get(metric, 4)
    error = "" if found.error is None else f" ± {found.error:.{digits}f}"
    return f"{found.value:.{digits}f}{error}"


def _seeds(one: Result) -> str:
    failed = len(one.outcomes) - len(one.done)
    return f"{len(one.done)}, {failed} failed" if failed else str(len(one.done))


def _aligned(columns: list[tuple[str, list[str]]]) -> str:
    columns = [(_escaped(head), [_escaped(cell) for cell in cells]) for head, cells in columns]
    widths = [max(len(text) for text in (head, *cells)) for head, cells in columns]
    if sum(widths) + 3 * len(widths) + 1 > _WIDTH:
        # Wider than it may be: without the spaces that line columns up.
        widths = [0] * len(widths)
    heads = [head for head, _ in columns]
    rows = [heads, ["-" * max(3, width) for width in widths]]
    rows += [list(row) for row in zip(*(cells for _, cells in columns), strict=True)]
    return "\n".join(
        "| " + " | ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, subsequent_indent=""))
