"""Writes a report: one self-contained HTML page with tables, and its pictures."""

from __future__ import annotations

import base64
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from stampede.engine.console import readable_bytes
from stampede.engine.errors import RunFolderError
from stampede.engine.heartbeat import READING
from stampede.engine.metrics import METRICS, PARTS
from stampede.engine.plots import to_png
from stampede.engine.report.drawing import Drawing
from stampede.engine.report.pictures import all_drawings
from stampede.engine.report.run_records import (
    RunRecord,
    Setting,
    by_data,
    differing_keys,
    readable,
    settings_of,
)
from stampede.files import write_file

PAGE = "report.html"

_MOST_CURVES = 20

# Twice the pixels of a page, for sharp text where a screen has them.
_DPI = 180

# A column: its heading, and what gives its cell for a setting.
_Column = tuple[str, Callable[[Setting], str]]


def write_report(
    runs: Sequence[RunRecord], folder: Path, baseline: RunRecord | None = None
) -> list[str]:
    """Write `report.html` and a PNG for each picture.

    Runs on different data get separate pictures: their AUCs cannot be compared. Outdated pictures
    of an earlier report are deleted; other files stay. The tables show how runs differ from the
    baseline.

    Returns:
        A sentence for each thing that the report lacks, apart from whole pictures of a single run.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    notes = [f"{run.label} {state}" for run in runs if (state := run.state())] + _advice(runs)
    groups = by_data(runs)
    drawings: dict[str, list[Drawing]] = {}
    for number, (data, members) in enumerate(groups.items(), 1):
        drawn = best(members)
        if len(drawn) < len(members):
            notes.append(
                f"Of {len(members)} runs, the pictures show the {len(drawn)} with the best test "
                "AUC; the picture of batch sizes shows all."
            )
        found = all_drawings(members, drawn)
        ending = "" if number == 1 else f"_{number}"
        drawings[data] = [replace(one, name=one.name + ending) for one in found]
    every = [one for of_data in drawings.values() for one in of_data]
    pictures = {one.name: to_png(one.figure, _DPI) for one in every if one.figure is not None}
    about = [table for table in (about_table(runs), step_table(runs)) if table.rows]
    text = _template().render(
        title=f"stampede: {runs[0].label if len(runs) == 1 else f'{len(runs)} runs'}",
        notes=notes,
        above=[*period_tables(runs), *result_tables(groups, baseline), *about],
        below=configuration_table(runs),
        groups=drawings,
        images={name: base64.b64encode(png).decode("ascii") for name, png in pictures.items()},
        absent=[one for one in every if one.left_out and one.figure is None],
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for one in every:
            if one.figure is None:
                (folder / f"{one.name}.png").unlink(missing_ok=True)
            else:
                write_file(folder / f"{one.name}.png", pictures[one.name])
        write_file(folder / PAGE, text)
    except OSError as failure:
        raise RunFolderError(
            f"{folder}: the report cannot be written ({failure.strerror or failure}); choose "
            "another folder with --out"
        ) from None
    # Most pictures that a single run lacks do not apply to it; the page names them.
    told = [one for one in every if one.figure is not None or len(runs) > 1]
    return [*notes, *(f"{one.title}: {sentence}" for one in told for sentence in one.left_out)]


def _advice(runs: Sequence[RunRecord]) -> list[str]:
    """The advice of the runs, each sentence once."""
    said: dict[str, list[str]] = {}
    for run in runs:
        for line in run.of_kind("advice"):
            said.setdefault(line["text"], []).append(run.label)
    if len(runs) == 1:
        return list(said)
    return [
        f"{labels[0] if len(labels) == 1 else f'{len(labels)} runs'}: {text}"
        for text, labels in said.items()
    ]


def best(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The best runs, as many as a picture can show distinctly, in their order."""
    kept = sorted(runs, key=lambda run: run.metric("test", "auc") or 0, reverse=True)[:_MOST_CURVES]
    return [run for run in runs if run in kept]


def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return environment.from_string(source)


@dataclass(frozen=True)
class Table:
    """A table of the page, with a note above it; without rows only the note is shown."""

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
    data_of = {one: data for data, runs in groups.items() for one in settings_of(runs)}
    settings = list(data_of)
    runs = [run for one in settings for run in one.runs]
    compared = next((one for one in settings if baseline in one.runs), None)
    label = [("run", lambda one: one.label)]
    if len(groups) > 1:
        label.append(("data", lambda one: data_of[one]))
    epoch = [
        ("selected epoch", partial(_shared, key="best_epoch")),
        ("chosen on", partial(_shared, key="selected_on")),
    ]
    selected = _metric_columns(runs, "selected")
    differences = []
    if compared is not None:
        same = [one for one in settings if data_of[one] == data_of[compared] and one != compared]
        differences = [
            (
                f"difference of {part} {METRICS[metric]}",
                partial(_difference, to=compared, part=part, metric=metric, only=same),
            )
            for metric in ("auc", "logloss")
            for part in PARTS
        ]
    further = [
        ("network", lambda one: readable(one.runs[0].config.get("model.name", ""))),
        ("batch size", lambda one: f"{one.runs[0].batch_size:,}"),
        ("rows clipped", partial(_in_summary, key="clipped_share", form="{:.2%}")),
        ("samples/s", partial(_in_summary, key="samples_per_second", form="{:,.0f}")),
        ("training time", partial(_in_summary, key="train_seconds", form="{:,.1f} s")),
    ]
    note = "Metrics of the epoch that was best on the part it was chosen on."
    several = len(runs) > len(settings)
    if several:
        note += " Mean ± standard deviation over the seeds."
    if compared is not None:
        note += f" Differences are to {compared.label}, ± their standard error over the seeds."
    columns = [*label, *epoch, *selected, *differences, *further]
    tables = [_table("Results", note, columns, settings)]
    note = "The same after the last epoch, for comparison; these weights are not the exported ones."
    last = [("last epoch", partial(_shared, key="epochs")), *_metric_columns(runs, "last")]
    tables.append(_table("The last epoch", note, [*label, *last], settings))
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

    def cell(one: Setting, part: str, metric: str) -> str:
        return _mean(one.values(lambda run: run.metric(part, metric, when)), "{:.4f}")

    return [
        (f"{part} {shown}", partial(cell, part=part, metric=metric))
        for metric, shown in METRICS.items()
        for part in PARTS
        if any(run.metric(part, metric, when) is not None for run in runs)
    ]


def _in_summary(one: Setting, key: str, form: str) -> str:
    return _mean(one.values(lambda run: run.summary.get(key)), form)


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


def _difference(one: Setting, to: Setting, part: str, metric: str, only: Sequence[Setting]) -> str:
    """The difference of a metric to a setting, for `only` some settings."""
    both = [of.values(lambda run: run.metric(part, metric)) for of in (one, to)]
    if one not in only or not all(both):
        return ""
    value, other = map(statistics.fmean, both)
    if min(map(len, both)) < 2:
        return f"{value - other:+.4f}"
    error = math.hypot(*(statistics.stdev(values) / math.sqrt(len(values)) for values in both))
    return f"{value - other:+.4f} ± {error:.4f}"


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
    ended = summary.get("end_time", "")[:16].replace("T", " ")
    return [
        run.label,
        *(_cell(count, ",") for count in counts),
        summary.get("version", ""),
        f"{ended} UTC" if ended else "",
        f"{summary.get('world_size', '')} x {summary.get('device', '')}",
    ]


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def period_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """Metrics of each file of a log before it was trained on; a table for each run."""
    header = ("period", "file", "rows", "AUC", "logloss", "norm. entropy", "calibration",
              "rows with new ids", "their AUC", "ids", "seconds", "of training")  # fmt: skip
    keys = {"rows": ",", "auc": ".4f", "logloss": ".4f", "normalized_entropy": ".4f",
            "calibration": ".4f", "new_ids_samples": ",", "new_ids_auc": ".4f", "ids": ",",
            "seconds": ",.1f", "train_seconds": ",.1f"}  # fmt: skip
    note = (
        "Metrics before the period was trained on; an untrained model scores the first. The rest "
        "of this page shows the run's newest period."
    )

    def cells(line: dict[str, Any]) -> list[str]:
        # An untrained model scored the first period.
        shown = {k: form for k, form in keys.items() if line["period"] > 1 or form != ".4f"}
        values = [_cell(line.get(key), form) if key in shown else "" for key, form in keys.items()]
        return [str(line["period"]), Path(line["file"]).name, *values]

    return [
        Table(f"Periods of {run.label}", note, header, [cells(line) for line in run.periods])
        for run in runs
        if run.periods
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
    line = max(lines, key=lambda each: (each["step_seconds"]["steps"], each["step"]))
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
    of_rank = [found for found in several if found["rank"] == rank]
    own, others = (statistics.fmean(f[name] for f in of_rank) for name in ("own", "others"))
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
    rows = [[run.label, *(readable(run.compared.get(k, "-")) for k in keys)] for run in runs]
    note = "All other keys are equal, except names, logging and checkpoints."
    return Table(title, note, ["run", *keys], rows)
