"""Where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from stampede.engine.figures import as_written
from stampede.engine.pulse import PHASES
from stampede.engine.report.drawing import (
    Drawing,
    add_legend,
    new_figure,
    not_shown,
    shortened,
)
from stampede.engine.report.run_records import RunRecord

# A phase that takes less of the time of every run stands with the others.
_LEAST = 0.03

_OTHERS = "other phases"

# Neighbours differ in brightness and in what fills them.
_FILLS = (
    ("#000000", ""), ("#e69f00", "//"), ("#0072b2", ""), ("#cccccc", ".."), ("#8c3b73", "xx"),
    ("#56b4e9", ""), ("#d55e00", "\\\\"), ("#f0e442", ""), ("#009e73", "--"), ("#ffffff", ""),
)  # fmt: skip

# Inches of a bar, and of what is around them.
_BAR, _REST = 0.34, 1.1


def draw_phases(runs: Sequence[RunRecord]) -> Drawing:
    """Milliseconds of a step by phase, a bar for each run."""
    name, title = "time_by_phase", "Time by phase"
    caption = (
        "Mean time of a step by what the ranks did in it, over all steps that were timed. The next "
        "batch is read and sent while the one before waits to be computed. Evaluation and "
        "checkpoints are left out."
    )
    found = [(run, seconds) for run in runs if (seconds := phase_seconds(run))]
    left_out = not_shown(
        runs, [run for run, _ in found], "no steps were timed (train.timing_every asks for it)"
    )
    if not found:
        return Drawing(name, title, caption, None, left_out)
    shown = [
        phase
        for phase in PHASES
        if any(seconds[phase] >= _LEAST * sum(seconds.values()) for _, seconds in found)
    ]
    figure = new_figure(_REST + _BAR * len(found))
    axes = figure.subplots()
    labels = [shortened(run.label, 24) for run, _ in found]
    left = [0.0] * len(found)
    for phase, (colour, hatch) in zip([*shown, _OTHERS], cycle(_FILLS), strict=False):
        hidden = [other for other in PHASES if other not in shown]
        of_phase = hidden if phase == _OTHERS else [phase]
        widths = [1e3 * sum(seconds[one] for one in of_phase) for _, seconds in found]
        axes.barh(
            range(len(found)), widths, 0.7, left, color=colour, hatch=hatch, edgecolor="#555555",
            linewidth=0.5, label=phase,
        )  # fmt: skip
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(found)), labels)
    as_written(axes.get_yticklabels())
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds of a step")
    axes.grid(axis="x", alpha=0.3)
    add_legend(figure)
    return Drawing(name, title, caption, figure, left_out)


def phase_seconds(run: RunRecord) -> dict[str, float]:
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
