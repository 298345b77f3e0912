"""Tables and pictures of a sweep: mean and standard error over the seeds of each point."""

from __future__ import annotations

import csv
import io
import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stampede.files import new_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stampede.lab.sweep import Sweep, Trial

# Digits after the point, if not 4.
_DIGITS = {"train_seconds": 1, "best_epoch": 1, "steps": 0, "samples_per_second": 0}
_SHOWN = {"auc": "AUC", "train_seconds": "seconds", "samples_per_second": "samples/s"}
_HOW = {
    "validation": "the epoch that was best on the validation part",
    "test": "the best epoch, chosen on the test part itself (evaluate.select_on=test): optimistic",
}
# Longer labels of an axis, all together, would overlap.
_LETTERS_ALONG = 60
# Different in black and white too.
_STYLES = ("o-", "s--", "^-.", "D:", "v-", "P--", "X-.", "*:", "<-", ">--")


class Mean(NamedTuple):
    """Mean over the seeds, and its standard error s/sqrt(n), which is None for a single seed."""

    value: float
    error: float | None


class Row(NamedTuple):
    """The trials of a point that were not rejected by tuning."""

    labels: dict[str, str]
    title: str
    done: list[Trial]
    failed: int

    def mean(self, column: str) -> Mean | None:
        """Mean of a column, see `columns`, over the trials that succeeded."""
        values = [value for trial in self.done if (value := _figure(trial, column)) is not None]
        if not values:
            return None
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return Mean(statistics.fmean(values), error)


def _figure(trial: Trial, column: str) -> float | None:
    part, _, metric = column.partition(" ")
    if metric:
        return trial.run.metrics.get(part, {}).get(metric)
    found = trial.run.summary.get(column)
    # Of the tables and of the dense layers.
    return sum(found.values()) if isinstance(found, dict) else found


def rows(trials: Sequence[Trial]) -> list[Row]:
    """A row per point, in order."""
    of_points: dict[str, list[Trial]] = {}
    for trial in trials:
        if not trial.rejected:
            of_points.setdefault(trial.point.title, []).append(trial)
    found = []
    for title, of_point in of_points.items():
        done = [trial for trial in of_point if not trial.message]
        found.append(Row(of_point[0].point.labels, title, done, len(of_point) - len(done)))
    return found


def columns(sweep: Sweep, found: Sequence[Row]) -> list[str]:
    """Such as `validation auc` and `test auc`, of the selected epoch, and `train_seconds`."""
    done = [trial for row in found for trial in row.done]
    parts = {part: of for trial in done for part, of in trial.run.metrics.items()}
    shown = []
    for name in sweep.metrics:
        of_parts = [f"{part} {name}" for part, of in parts.items() if name in of]
        shown += of_parts or [name]
    return shown


def _title(column: str) -> str:
    part, _, metric = column.rpartition(" ")
    return f"{part} {_SHOWN.get(metric, metric)}".strip()


def to_csv(sweep: Sweep, trials: Sequence[Trial]) -> str:
    """A line per point, numbers in full."""
    found = rows(trials)
    lines = []
    for row in found:
        line: dict[str, Any] = dict(row.labels)
        for column in columns(sweep, found):
            name = column.replace(" ", "_")
            line[f"{name}_mean"], line[f"{name}_stderr"] = row.mean(column) or (None, None)
        line |= {"seeds": len(row.done), "failed": row.failed}
        lines.append(line)
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def to_markdown(name: str, sweep: Sweep, trials: Sequence[Trial]) -> str:
    """The data, how epochs were chosen, the table, and which trials failed."""
    found = rows(trials)
    done = [trial for row in found for trial in row.done]
    said = [f"# {name}"]
    if done:
        of = done[0].run
        path = getattr(of.config.data, "path", "")
        data = ", ".join(filter(None, [of.config.data.kind, str(path)]))
        counted = of.summary["rows"]
        said.append(
            _wrapped(
                f"Data: {data}; {counted['train']:,} training rows, {counted['test']:,} test rows."
            )
        )
    parts = sorted({trial.run.summary["selected_on"] for trial in done})
    how = "Figures at " + ("; ".join(_HOW[part] for part in parts) or "no epoch: none was finished")
    if len(sweep.seeds) > 1:
        how += ", mean ± standard error over the seeds"
    if sweep.tune:
        how += (
            f". {sweep.tune}: the tried value with the largest AUC on the part that chose the "
            f"epoch, with seed {sweep.seeds[0]}"
        )
    said.append(_wrapped(f"{how}."))
    table = []
    for row in found:
        cells = dict(row.labels)
        for column in columns(sweep, found):
            cells[_title(column)] = _shown(row.mean(column), column)
        cells["seeds"] = f"{len(row.done)}" + (f", {row.failed} failed" if row.failed else "")
        for other, aucs in sweep.published.items():
            labels = [text for axis, text in row.labels.items() if axis != sweep.tune]
            auc = aucs.get(" / ".join(labels))
            cells[f"published AUC, {other}"] = "" if auc is None else f"{auc:.4f}"
        table.append(cells)
    lines = [table[0].keys(), ["---"] * len(table[0]), *(cells.values() for cells in table)]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    said.append("\n".join(f"| {' | '.join(line)} |" for line in escaped))
    failed = [
        _wrapped(f"- {trial.point.title}, seed {trial.seed}: {trial.message}")
        for trial in trials
        if trial.message
    ]
    if failed:
        said.append("Failed (`--retry-failed` runs them again):\n\n" + "\n".join(failed))
    return "\n\n".join(said) + "\n"


def _shown(found: Mean | None, column: str) -> str:
    if found is None:
        return ""
    digits = 0 if column == "parameters" else _DIGITS.get(column, 4)
    # No seed changes these.
    without = found.error is None or column in ("parameters", "attainable_auc")
    return f"{found.value:,.{digits}f}" + ("" if without else f" ± {found.error:,.{digits}f}")


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 100))


def draw(sweep: Sweep, trials: Sequence[Trial], folder: Path) -> list[Path]:
    """Draw the trials that succeeded; returns the PNG files."""
    found = [row for row in rows(trials) if row.done]
    aucs = [f"{part} auc" for part in found[0].done[0].run.metrics]
    figures = {
        "auc.png": _grid_figure(sweep, found, aucs),
        "seconds.png": _grid_figure(sweep, found, ["train_seconds"]),
    }
    from matplotlib.text import Text

    for name, figure in figures.items():
        for text in figure.findobj(Text):
            # Names with dollar signs are not formulas.
            text.set_parse_math(False)
        with new_file(folder / name) as unfinished:
            figure.savefig(unfinished, dpi=120, format="png")
    return [folder / name for name in figures]


def _grid_figure(sweep: Sweep, found: Sequence[Row], shown: Sequence[str]) -> Figure:
    """A panel per column, side by side: validation and test may differ in level."""
    from matplotlib.figure import Figure

    axes = [axis for axis in sweep.grid if axis != sweep.tune]
    x = sweep.x or axes[-1]
    along = list(dict.fromkeys(row.labels[x] for row in found))
    # Lines would suggest that names, such as the clips', have an order.
    in_order = all(text[:1].isdigit() for text in along)
    figure = Figure(figsize=(1.5 + 6.0 * len(shown), 4.5), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for panel, column in zip(panels, shown, strict=True):
        lines: dict[str, list[Row]] = {}
        for row in found:
            if row.mean(column) is not None:
                others = " / ".join(row.labels[axis] for axis in axes if axis != x)
                lines.setdefault(others, []).append(row)
        for number, (title, of_line) in enumerate(lines.items()):
            style = _STYLES[number % len(_STYLES)][: None if in_order else 1]
            # Side by side, so that error bars do not overlap.
            shift = 0.06 * (number - (len(lines) - 1) / 2)
            places = [along.index(row.labels[x]) + shift for row in of_line]
            values, errors = zip(*(row.mean(column) for row in of_line), strict=True)
            errors = [error or 0.0 for error in errors]
            panel.errorbar(places, values, errors, fmt=style, capsize=3, label=title or None)
        panel.set_xticks(range(len(along)), along)
        if sum(map(len, along)) > _LETTERS_ALONG:
            panel.tick_params(axis="x", rotation=30)
        panel.set(xlabel=x, ylabel=_title(column))
        panel.grid(alpha=0.3)
    if panels[-1].get_legend_handles_labels()[0]:
        title = " / ".join(axis for axis in axes if axis != x)
        panels[-1].legend(loc="best", fontsize=8, title=title, title_fontsize=8)
    figure.suptitle("mean over the seeds; bars: standard error", fontsize=9)
    return figure
