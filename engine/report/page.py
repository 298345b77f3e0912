"""Writes a report: one self-contained HTML page, and its pictures."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from stampede.engine.errors import RunFolderError
from stampede.engine.plots import to_png
from stampede.engine.report.drawing import Drawing
from stampede.engine.report.pictures import all_drawings
from stampede.engine.report.run_records import RunRecord, by_data
from stampede.engine.report.tables import (
    about_table,
    configuration_table,
    period_tables,
    result_tables,
    step_table,
)
from stampede.files import write_file

PAGE = "report.html"

_MOST_CURVES = 20

# Twice the pixels of a page, for sharp text where a screen has them.
_DPI = 180


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
