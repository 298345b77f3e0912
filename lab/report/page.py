"""Writes a report: one self-contained HTML page with tables, and its pictures."""

from __future__ import annotations

import base64
import html
import json
import math
import os
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from stampede import RunFolderError
from stampede.files import write_file
from stampede.lab.report.pictures import Picture, all_pictures, to_png
from stampede.lab.report.records import (
    METRICS,
    PARTS,
    RunRecord,
    Setting,
    by_data,
    differing_keys,
    flat_keys,
    open_runs,
    readable,
    settings_of,
)

PAGE = "report.html"

# Bytes of a page in which its runs are named.
_HEAD = 1 << 16

_MOST_CURVES = 20

# Of the phases of a step.
_READING = "reading the next batch"

# A table with more columns than this has a column for each run instead, if they are so few; else
# it goes on below.
_MANY_COLUMNS, _FEW_RUNS = 7, 3

# Twice the pixels of a page, for sharp text where a screen has them.
_DPI = 180

# Cells of a table's row, by the heading of their column.
Row = dict[str, str]


def write_report(
    runs: Sequence[RunRecord], folder: Path, baseline: RunRecord | None = None
) -> list[str]:
    """Write `report.html` and a PNG for each picture.

    Runs on different data get separate pictures: their AUCs cannot be compared. Pictures of an
    earlier report are deleted if they are outdated; other files stay.

    Returns:
        A sentence for each thing that the report lacks, apart from whole pictures of a single run.

    Raises:
        RunFolderError: the folder cannot be written, or holds the page of other runs.
    """
    _check_page(folder / PAGE, runs)
    notes = [f"{run.label} {state}" for run in runs if (state := run.state())] + _advice(runs)
    groups = by_data(runs)
    pictures: dict[str, list[Picture]] = {}
    for data, members in groups.items():
        drawn = best(members)
        if len(drawn) < len(members):
            notes.append(
                f"Of {len(members)} runs, the pictures show the {len(drawn)} with the best test "
                "AUC; the picture of batch sizes shows all."
            )
        pictures[data] = all_pictures(members, drawn)
        for one in pictures[data] if len(pictures) > 1 else ():
            one.name += f"_{len(pictures)}"
    every = [one for of_data in pictures.values() for one in of_data]
    pngs = {one.name: to_png(one.figure, _DPI) for one in every if one.figure is not None}
    about = [table for table in (about_table(runs), step_table(runs)) if table.rows]
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    text = page.render(
        runs=json.dumps(_names(runs, folder)),
        title=f"stampede: {runs[0].label if len(runs) == 1 else f'{len(runs)} runs'}",
        notes=notes,
        above=[*period_tables(runs), *result_tables(groups, baseline), *about],
        below=configuration_table(runs),
        groups=pictures,
        images={name: base64.b64encode(png).decode("ascii") for name, png in pngs.items()},
        absent=[one for one in every if one.left_out and one.figure is None],
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for one in every:
            if one.name in pngs:
                write_file(folder / f"{one.name}.png", pngs[one.name])
            else:
                (folder / f"{one.name}.png").unlink(missing_ok=True)
        write_file(folder / PAGE, text)
    except OSError as failure:
        raise RunFolderError(
            f"{folder}: the report cannot be written ({failure.strerror or failure}); choose "
            "another folder with --out"
        ) from None
    # Most pictures that a single run lacks do not apply to it; the page names them.
    told = [one for one in every if one.figure is not None or len(runs) > 1]
    return [*notes, *(f"{one.title}: {sentence}" for one in told for sentence in one.left_out)]


def report_on(run: Path, folder: Path) -> Path:
    """Write the report of one run; returns its page."""
    write_report(open_runs([run]), folder)
    return folder / PAGE


def _names(runs: Sequence[RunRecord], folder: Path) -> list[str]:
    """The runs of a page in a folder, by paths that stay if both are moved."""
    return sorted(os.path.relpath(run.path, folder) for run in runs)


def _check_page(page: Path, runs: Sequence[RunRecord]) -> None:
    """Refuse to overwrite the page of a run that is not among these."""
    if not page.is_file():
        return
    with page.open("rb") as file:
        head = file.read(_HEAD).decode("utf-8", "replace")
    found = re.search(r'<meta name="runs" content="([^"]*)">', head)
    others = ["other runs"]
    with suppress(ValueError):
        named = map(str, json.loads(html.unescape(found[1] if found else "")))
        others = [name for name in named if name not in _names(runs, page.parent)]
    if others:
        raise RunFolderError(
            f"{page}: is the page of {', '.join(others)[:200]}; write another --out, or delete it"
        )


def _advice(runs: Sequence[RunRecord]) -> list[str]:
    """The advice of the runs, each sentence once."""
    said: dict[str, list[str]] = {}
    for run in runs:
        for line in run.of_kind("advice"):
            said.setdefault(line["text"], []).append(run.label)
    if len(runs) == 1:
        return list(said)
    who = {text: of[0] if len(of) == 1 else f"{len(of)} runs" for text, of in said.items()}
    return [f"{whose}: {text}" for text, whose in who.items()]


def best(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The best runs, as many as a picture can show distinctly, in their order."""
    kept = sorted(runs, key=lambda run: run.metric("test", "auc") or 0, reverse=True)[:_MOST_CURVES]
    return [run for run in runs if run in kept]


@dataclass(frozen=True)
class Table:
    """A table of the page, with a note above it; without rows only the note is shown."""

    title: str
    note: str
    rows: Sequence[Row] = ()

    @property
    def header(self) -> dict[str, bool]:
        """The headings, and whether their columns hold only numbers, to be aligned right."""
        first, *others = self.rows[0] if self.rows else [""]
        return {first: False} | {
            head: all(r[head].lstrip("+-")[:1].isdigit() for r in self.rows if r[head])
            for head in others
        }

    @property
    def on_its_side(self) -> bool:
        """Whether runs are columns, as headings are many and runs are few."""
        return len(self.header) > _MANY_COLUMNS and len(self.rows) <= _FEW_RUNS

    @property
    def stretches(self) -> list[dict[str, bool]]:
        """The headings in stretches that fit beside each other, all with the first one."""
        (first, is_number), *others = self.header.items()
        most = _MANY_COLUMNS
        cuts = [others[at : at + most] for at in range(0, len(others), most)]
        return [{first: is_number} | dict(one) for one in cuts or [[]]]


def result_tables(groups: dict[str, list[RunRecord]], baseline: RunRecord | None) -> list[Table]:
    """Results of the selected epoch, of the last one, and of every run if seeds are averaged.

    Args:
        groups: see `by_data`.
        baseline: others on the same data are compared with it.
    """
    data_of = {one: data for data, runs in groups.items() for one in settings_of(runs)}
    settings = list(data_of)
    runs = [run for one in settings for run in one.runs]
    compared = next((one for one in settings if baseline in one.runs), None)

    def named(one: Setting) -> Row:
        return {"run": one.label} | ({"data": data_of[one]} if len(groups) > 1 else {})

    def distinct(one: Setting, key: str) -> str:
        return ", ".join(dict.fromkeys(map(str, one.figures(key))))

    def metrics(one: Setting, when: str, goal: str = "") -> Row:
        return {
            f"{part} {shown}": _mean(one.metric(part, name, when, goal), ".4f")
            for name, shown in METRICS.items()
            for part in PARTS
            if any(of.metric(part, name, when, goal) for of in settings)
        }

    def differences(one: Setting) -> Row:
        if compared is None:
            return {}
        comparable = one is not compared and data_of[one] == data_of[compared]
        return {
            f"difference of {part} {METRICS[name]}": _difference(
                one.metric(part, name), compared.metric(part, name) if comparable else []
            )
            for name in ("auc", "logloss")
            for part in PARTS
        }

    def selected(one: Setting) -> Row:
        first = one.runs[0]
        return {
            "selected epoch": distinct(one, "best_epoch"),
            "chosen on": distinct(one, "selected_on"),
            **metrics(one, "selected"),
            # Not of a single seed.
            **(differences(one) if one in data_of else {}),
            "network": readable(first.config.get("model.name", "")),
            "batch size": f"{first.batch_size:,}",
            "rows clipped": _mean(one.figures("clipped_share"), ".2%"),
            "samples/s": _mean(one.figures("samples_per_second"), ",.0f"),
            "training time": _mean(one.figures("train_seconds"), ",.1f", " s"),
        }

    note = "Metrics of the epoch that was best on the part it was chosen on."
    several = len(runs) > len(settings)
    if several:
        note += " Mean ± standard deviation over the seeds."
    if compared is not None:
        note += f" Differences are to {compared.label}, ± their standard error over the seeds."
    after = (
        "The same after the last epoch, for comparison; these weights are not the exported ones."
    )
    last = [
        {**named(one), "last epoch": distinct(one, "epochs"), **metrics(one, "last")}
        for one in settings
    ]
    tables = [
        Table("Results", note, [named(one) | selected(one) for one in settings]),
        Table("The last epoch", after, last),
    ]
    for goal in dict.fromkeys(goal for one in settings for goal in one.goals):
        rows = [named(one) | metrics(one, "selected", goal) for one in settings]
        tables.insert(-1, Table(f"The goal {goal}", f"Metrics of {goal} in that epoch.", rows))
    if several:
        each = [
            {"run": run.label, "seed": readable(run.config.get("run.seed", ""))}
            | selected(Setting(run.label, (run,)))
            for run in runs
        ]
        tables.append(Table("Every seed", "The runs that are averaged above.", each))
    return tables


def _mean(values: Sequence[float], form: str, unit: str = "") -> str:
    if not values:
        return ""
    mean = format(statistics.fmean(values), form) + unit
    if len(values) < 2 or unit or form.endswith("%"):
        return mean
    return f"{mean} ± {statistics.stdev(values):{form}}"


def _difference(values: Sequence[float], others: Sequence[float]) -> str:
    if not values or not others:
        return ""
    difference = f"{statistics.fmean(values) - statistics.fmean(others):+.4f}"
    if min(len(values), len(others)) < 2:
        return difference
    errors = (statistics.stdev(of) / math.sqrt(len(of)) for of in (values, others))
    return f"{difference} ± {math.hypot(*errors):.4f}"


def about_table(runs: Sequence[RunRecord]) -> Table:
    """Rows, ids, parameters, version and date of each run that has ended."""
    counts = {
        "training rows": "rows.train",
        **{f"{part} rows": f"rows.{part}" for part in PARTS},
        "ids": "ids",
        "parameters of tables": "parameters.tables",
        "of dense layers": "parameters.dense",
    }

    def row(label: str, summary: dict[str, Any]) -> Row:
        ended = summary.get("end_time", "")[:16].replace("T", " ")
        return {
            "run": label,
            **{head: _cell(summary.get(key), ",") for head, key in counts.items()},
            "version": summary.get("version", ""),
            "ended": f"{ended} UTC" if ended else "",
            "on": f"{summary.get('world_size', '')} x {summary.get('device', '')}",
        }

    rows = [row(run.label, flat_keys(run.summary)) for run in runs if run.summary]
    return Table("Data and models", "", rows)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def period_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """Metrics of each file of a log before it was trained on; a table for each run."""
    columns = {
        "rows": ("rows", ","),
        "AUC": ("auc", ".4f"),
        "logloss": ("logloss", ".4f"),
        "norm. entropy": ("normalized_entropy", ".4f"),
        "calibration": ("calibration", ".4f"),
        "rows with new ids": ("new_ids_samples", ","),
        "their AUC": ("new_ids_auc", ".4f"),
        "ids": ("ids", ","),
        "seconds": ("seconds", ",.1f"),
        "of training": ("train_seconds", ",.1f"),
    }
    note = (
        "Metrics before the period was trained on; an untrained model scores the first. The rest "
        "of this page shows the run's newest period."
    )

    tables = []
    for run in runs:
        rows = []
        for line in run.periods:
            row = {"period": str(line["period"]), "file": Path(line["file"]).name}
            for head, (key, form) in columns.items():
                # An untrained model scored the first period.
                is_hidden = line["period"] == 1 and form == ".4f"
                row[head] = "" if is_hidden else _cell(line.get(key), form)
            rows.append(row)
        if rows:
            tables.append(Table(f"Periods of {run.label}", note, rows))
    return tables


def step_table(runs: Sequence[RunRecord]) -> Table:
    """Times of steps in the longest timed stretch, and the slowest rank."""
    percentiles = {"p50": "p50", "p90": "p90", "p99": "p99", "longest": "max"}

    def row(label: str, lines: Sequence[dict[str, Any]]) -> Row:
        line = max(lines, key=lambda each: (each["step_seconds"]["steps"], each["step"]))
        seconds, slowest = line["step_seconds"], line["slowest_seconds"]
        own, others = (f"{1e3 * (slowest[whose] or 0):,.1f} ms" for whose in ("own", "others"))
        said = f"{slowest['rank']}: {own} without waiting, the others {others}"
        return {
            "run": label,
            "steps": f"{line['step'] - seconds['steps'] + 1:,} to {line['step']:,}",
            **{head: f"{1e3 * seconds[key]:,.1f} ms" for head, key in percentiles.items()},
            "reading": f"{line['phase_seconds'].get(_READING, 0) / seconds['mean']:.1%}",
            "communication": f"{line['communication_seconds'] / seconds['mean']:.1%}",
            "slowest rank": said if slowest["others"] else "",
            "peak memory": f"{line['peak_memory_bytes'] / 1e9:.2f} GB",
        }

    note = "Times of steps on the slowest rank, in the longest timed stretch."
    timed = [(run.label, lines) for run in runs if (lines := run.of_kind("timing"))]
    return Table("Steps", note, [row(label, lines) for label, lines in timed])


def configuration_table(runs: Sequence[RunRecord]) -> Table:
    """All keys of a single run, or the keys in which several runs differ."""
    if len(runs) == 1:
        values = [{"key": k, "value": readable(value)} for k, value in runs[0].config.items()]
        return Table("Configuration", "All keys.", values)
    title, keys = "Differences of the configurations", differing_keys(runs)
    if not keys:
        return Table(title, "All runs have the same settings.")
    note = "All other keys are equal, except names, logging and checkpoints."
    rows = [{"run": r.label} | {k: readable(r.compared.get(k, "-")) for k in keys} for r in runs]
    return Table(title, note, rows)
