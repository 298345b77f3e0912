"""Writes a report: its page and its pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from stampede.engine.errors import RunFolderError
from stampede.engine.figures import to_png
from stampede.engine.report.batch_size import draw_batch_size
from stampede.engine.report.calibration import draw_calibration
from stampede.engine.report.clipped_rows import draw_by_count, draw_by_field
from stampede.engine.report.clipped_share import draw_clipped
from stampede.engine.report.differences import difference_table, readable
from stampede.engine.report.drawing import Drawing
from stampede.engine.report.embedding_norms import draw_embedding_norms
from stampede.engine.report.learning_curves import draw_auc, draw_loss
from stampede.engine.report.page import Table, page
from stampede.engine.report.phases import draw_phases
from stampede.engine.report.results import result_table
from stampede.engine.report.run_records import RunRecord
from stampede.engine.report.step_times import step_time_table
from stampede.engine.report.wall_time import draw_wall_time
from stampede.engine.whole_files import write_whole

PAGE = "report.html"

_MOST_CURVES = 20

# Twice the pixels of a page, for sharp text where a screen has them.
_DPI = 180

_DRAWN: tuple[Callable[[Sequence[RunRecord]], Drawing], ...] = (
    partial(draw_auc, part="test"),
    partial(draw_auc, part="validation"),
    draw_loss,
    draw_wall_time,
    draw_batch_size,
    draw_calibration,
    draw_clipped,
    draw_by_count,
    draw_by_field,
    draw_embedding_norms,
    draw_phases,
)


def write_report(runs: Sequence[RunRecord], folder: Path) -> list[str]:
    """Write `report.html` and a PNG for each picture.

    Pictures of an earlier report that this one lacks are deleted, other files left alone.

    Args:
        folder: made where it is not there.

    Returns:
        A sentence for each thing that the report lacks.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    notes = [f"{run.label} {run.state()}" for run in runs if run.state() is not None]
    drawn = best(runs)
    if len(drawn) < len(runs):
        notes.append(
            f"Of {len(runs)} runs, the pictures but that of batch sizes show the {len(drawn)} with "
            "the best test AUC."
        )
    drawings = [draw(runs if draw is draw_batch_size else drawn) for draw in _DRAWN]
    pictures = {d.name: to_png(d.figure, _DPI) for d in drawings if d.figure is not None}
    what = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    text = page(
        f"stampede: {what}",
        "Numbers and pictures of what training runs recorded; dashes and markers tell runs apart.",
        [*notes, *_advice(runs)],
        _tables(runs),
        drawings,
        pictures,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for drawing in drawings:
            if drawing.figure is None:
                (folder / f"{drawing.name}.png").unlink(missing_ok=True)
            else:
                write_whole(folder / f"{drawing.name}.png", pictures[drawing.name])
        write_whole(folder / PAGE, text)
    except OSError as failure:
        raise RunFolderError(
            f"{folder}: the report cannot be written ({failure.strerror or failure}); choose "
            "another folder with --out"
        ) from None
    return [*notes, *(f"{d.title}: {sentence}" for d in drawings for sentence in d.left_out)]


def best(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """As many as can be told apart in a picture, in their order."""
    ranked = sorted(runs, key=lambda run: run.summary.get("best_auc") or 0, reverse=True)
    kept = {run.path for run in ranked[:_MOST_CURVES]}
    return [run for run in runs if run.path in kept]


def _advice(runs: Sequence[RunRecord]) -> list[str]:
    """What runs said when something was off, each sentence once."""
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


def _tables(runs: Sequence[RunRecord]) -> list[Table]:
    above = [Table("Results", "What each run ended with.", *result_table(runs))]
    header, rows = step_time_table(runs)
    if rows:
        note = "Times of steps on the slowest rank, in the longest stretch that was timed."
        above.append(Table("Steps", note, header, rows))
    title = "Configuration"
    if len(runs) == 1:
        values = [[key, readable(value)] for key, value in runs[0].config.items()]
        return [*above, Table(title, "All keys.", ["key", "value"], values)]
    title = "Differences of the configurations"
    header, rows = difference_table(runs)
    if len(header) == 1:
        return [*above, Table(title, "All runs compute the same.")]
    return [
        *above,
        Table(
            title, "All other keys are equal, but for names, logging and checkpoints.", header, rows
        ),
    ]
