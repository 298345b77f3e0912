"""Tables of the report: results, data and models, step times, and differing keys."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stampede.engine.console import readable_bytes
from stampede.engine.heartbeat import READING
from stampede.engine.report.run_records import (
    RunRecord,
    Setting,
    differing_keys,
    readable,
    settings_of,
)
from stampede.engine.summary import METRICS, PARTS

_ABSENT = "-"

# Metrics whose differences to a baseline are shown.
_COMPARED = ("auc", "logloss")

# A column: its heading, and what gives its cell for a setting.
_Column = tuple[str, Callable[[Setting], str]]


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        title: heading.
        note: a sentence above it.
        header, rows: cells; without rows only the note is shown.
    """

    title: str
    note: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold only numbers, to be aligned right."""
        columns = list(zip(*self.rows, strict=True))
        return [
            number > 0 and all(cell.lstrip("+-")[:1].isdigit() for cell in column if cell)
            for number, column in enumerate(columns)
        ]


def result_tables(groups: dict[str, list[RunRecord]], baseline: RunRecord | None) -> list[Table]:
    """Results of the selected epoch, of the last one, and of every run if seeds are averaged.

    Args:
        groups: runs by data; see `by_data`.
        baseline: the run to compare others on the same data with; None: no comparison.
    """
    settings = {data: settings_of(runs) for data, runs in groups.items()}
    rows = [(one, data) for data, found in settings.items() for one in found]
    runs = [run for one, _ in rows for run in one.runs]
    compared = next((one for one, _ in rows if baseline in one.runs), None)
    # Compare only settings on the same data, without the baseline itself.
    same = [one for found in settings.values() if compared in found for one in found]
    same = [one for one in same if one is not compared]
    label = [("run", lambda one: one.label)]
    if len(groups) > 1:
        data_of = {one.label: data for one, data in rows}
        label.append(("data", lambda one: data_of.get(one.label, "")))
    epoch = [
        ("selected epoch", lambda one: _shared(one, "best_epoch")),
        ("chosen on", lambda one: _shared(one, "selected_on")),
    ]
    selected = _metric_columns(runs, "selected")
    differences = [
        (
            f"difference of {part} {METRICS[metric]}",
            lambda one, p=part, m=metric: _difference(one, compared, p, m) if one in same else "",
        )
        for metric in (_COMPARED if compared is not None else ())
        for part in PARTS
    ]
    further = [
        ("network", lambda one: readable(one.runs[0].config.get("model.name", ""))),
        ("batch size", lambda one: f"{one.runs[0].batch_size:,}"),
        ("rows clipped", lambda one: _mean(one.values(_in_summary("clipped_share")), "{:.2%}")),
        ("samples/s", lambda one: _mean(one.values(_in_summary("samples_per_second")), "{:,.0f}")),
        ("training time", lambda one: _mean(one.values(_in_summary("train_seconds")), "{:,.1f} s")),
    ]
    note = "Metrics of the epoch that was best on the part it was chosen on."
    several = len(runs) > len(rows)
    if several:
        note += " Mean ± standard deviation over the seeds."
    if compared is not None:
        note += f" Differences are to {compared.label}, ± their standard error over the seeds."
    found = [one for one, _ in rows]
    tables = [_table("Results", note, [*label, *epoch, *selected, *differences, *further], found)]
    note = "The same after the last epoch, for comparison; these weights are not the exported ones."
    last = [("last epoch", lambda one: _shared(one, "epochs")), *_metric_columns(runs, "last")]
    tables.append(_table("The last epoch", note, [*label, *last], found))
    if several:
        seed = ("seed", lambda one: readable(one.runs[0].config.get("run.seed", "")))
        each = [Setting(run.label, (run,)) for run in runs]
        columns = [label[0], seed, *epoch, *selected, *further]
        tables.append(_table("Every seed", "The runs that are averaged above.", columns, each))
    return tables


def _table(title: str, note: str, columns: Sequence[_Column], found: Sequence[Setting]) -> Table:
    rows = [[cell(one) for _, cell in columns] for one in found]
    return Table(title, note, [head for head, _ in columns], rows)


def _metric_columns(runs: Sequence[RunRecord], when: str) -> list[_Column]:
    """A column for each metric and part that some run has."""
    return [
        (
            f"{part} {shown}",
            lambda one, p=part, m=metric: _mean(
                one.values(lambda one: one.metric(p, m, when)), "{:.4f}"
            ),
        )
        for metric, shown in METRICS.items()
        for part in PARTS
        if any(run.metric(part, metric, when) is not None for run in runs)
    ]


def _in_summary(key: str) -> Callable[[RunRecord], float | None]:
    return lambda run: run.summary.get(key)


def _shared(one: Setting, key: str) -> str:
    """The distinct values of a key in the summaries."""
    values = [str(run.summary[key]) for run in one.runs if key in run.summary]
    return ", ".join(dict.fromkeys(values))


def _mean(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    mean = form.format(statistics.fmean(values))
    if len(values) < 2 or not form.endswith("f}"):
        return mean
    return f"{mean} ± {form.format(statistics.stdev(values))}"


def _difference(one: Setting, compared: Setting, part: str, metric: str) -> str:
    def of(run: RunRecord) -> float | None:
        return run.metric(part, metric)

    values, others = one.values(of), compared.values(of)
    if not values or not others:
        return ""
    shown = f"{statistics.fmean(values) - statistics.fmean(others):+.4f}"
    if min(len(values), len(others)) < 2:
        return shown
    error = math.hypot(*(statistics.stdev(v) / math.sqrt(len(v)) for v in (values, others)))
    return f"{shown} ± {error:.4f}"


def about_table(runs: Sequence[RunRecord]) -> Table:
    """Rows, ids, parameters, version and date of each run."""
    header = ["run", *(f"{part} rows" for part in ("training", *PARTS)), "ids",
              "parameters of tables", "of dense layers", "version", "ended", "on"]  # fmt: skip
    return Table("Data and models", "", header, [_about(run) for run in runs if run.summary])


def _about(run: RunRecord) -> list[str]:
    summary = run.summary
    rows, parameters = summary.get("rows", {}), summary.get("parameters", {})
    counts = [*(rows.get(part) for part in ("train", *PARTS)), summary.get("ids"),
              *(parameters.get(name) for name in ("tables", "dense"))]  # fmt: skip
    ended = str(summary.get("end_time", ""))[:16].replace("T", " ")
    return [
        run.label,
        *("" if count is None else f"{count:,}" for count in counts),
        str(summary.get("version", "")),
        f"{ended} UTC" if ended else "",
        f"{summary.get('world_size', '')} x {summary.get('device', '')}",
    ]


def period_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """Metrics of each file of a log before it was trained on; a table for each run."""
    header = ("period", "file", "rows", "AUC", "logloss", "norm. entropy", "calibration",
              "rows with new ids", "their AUC", "ids", "seconds", "of training")  # fmt: skip
    note = (
        "Metrics before the period was trained on; an untrained model scores the first. The rest "
        "of this page shows the run's newest period."
    )
    return [
        Table(f"Periods of {run.label}", note, header, [_period(line) for line in run.periods])
        for run in runs
        if run.periods
    ]


def _period(line: dict[str, Any]) -> list[str]:
    def number(name: str, form: str) -> str:
        value = line.get(name)
        # An untrained model scored the first period.
        unscored = line["period"] == 1 and form == ".4f"
        return "" if value is None or unscored else format(value, form)

    return [
        str(line["period"]),
        Path(line["file"]).name,
        number("rows", ","),
        *(number(name, ".4f") for name in ("auc", "logloss", "normalized_entropy", "calibration")),
        number("new_ids_samples", ","),
        number("new_ids_auc", ".4f"),
        number("ids", ","),
        *(number(name, ",.1f") for name in ("seconds", "train_seconds")),
    ]


def step_table(runs: Sequence[RunRecord]) -> Table:
    """Times of steps in the longest timed stretch, and the slowest rank."""
    header = ("run", "steps", "p50", "p90", "p99", "longest", "reading", "communication",
              "slowest rank", "peak memory")  # fmt: skip
    timed = [(run, run.of_kind("timing")) for run in runs]
    rows = [_steps(run.label, lines) for run, lines in timed if lines]
    note = "Times of steps on the slowest rank, in the longest timed stretch."
    return Table("Steps", note, header, rows)


def _steps(label: str, lines: Sequence[dict[str, Any]]) -> list[str]:
    line = max(lines, key=lambda line: (line["step_seconds"]["steps"], line["step"]))
    seconds, mean = line["step_seconds"], line["step_seconds"]["mean"]
    first = line["step"] - seconds["steps"] + 1
    return [
        label,
        f"{first:,} to {line['step']:,}",
        *(f"{1e3 * seconds[name]:,.1f} ms" for name in ("p50", "p90", "p99", "max")),
        f"{line['phase_seconds'].get(READING, 0) / mean:.1%}",
        f"{line['communication_seconds'] / mean:.1%}",
        _slowest(lines),
        readable_bytes(line["peak_memory_bytes"]),
    ]


def _slowest(lines: Sequence[dict[str, Any]]) -> str:
    """The rank that was slowest most often, and how often; empty for a single rank."""
    several = [line["slowest_seconds"] for line in lines if line["slowest_seconds"]["others"]]
    if not several:
        return ""
    rank, often = Counter(found["rank"] for found in several).most_common(1)[0]
    own, others = (
        sum(found[name] for found in several if found["rank"] == rank) / often
        for name in ("own", "others")
    )
    return (
        f"{rank}, {often:,} of {len(several):,} times: {1e3 * own:,.1f} ms without waiting, the "
        f"others {1e3 * others:,.1f} ms"
    )


def configuration_table(runs: Sequence[RunRecord]) -> Table:
    """All keys of a single run, or the keys in which several runs differ."""
    if len(runs) == 1:
        values = [[key, readable(value)] for key, value in runs[0].config.items()]
        return Table("Configuration", "All keys.", ["key", "value"], values)
    title, keys = "Differences of the configurations", differing_keys(runs)
    if not keys:
        return Table(title, "All runs have the same settings.")
    rows = [[run.label, *(readable(run.compared.get(k, _ABSENT)) for k in keys)] for run in runs]
    note = "All other keys are equal, except names, logging and checkpoints."
    return Table(title, note, ["run", *keys], rows)
