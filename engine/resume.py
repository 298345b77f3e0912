"""What a run begins with: nothing, weights of another run, or its own newest checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stampede.data import Dataset, click_share
from stampede.engine.checkpoint import changes, load, newest_whole, read_manifest
from stampede.engine.checkpoint.manifest import Manifest, Progress
from stampede.engine.config import Config
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.kept import check_executed
from stampede.engine.job import Job
from stampede.engine.processes import PATIENCE, Processes
from stampede.engine.run_folder import RunFolder
from stampede.engine.warm_start import (
    LoadReport,
    Source,
    draw_rows_of_new_ids,
    load_matching,
    open_source,
    progress_after,
)


@dataclass(frozen=True)
class Found:
    """What there is to begin with, before data are read.

    Attributes:
        newest: checkpoint that the run continues; None for a new run.
        saved: the configuration of that checkpoint.
        changed: what changed in the configuration since then, line by line.
        source: where a new run takes its weights from.
        lost: a sentence for the user where a run should continue but has no checkpoint.
    """

    newest: Path | None = None
    saved: dict[str, Any] | None = None
    changed: list[str] = field(default_factory=list)
    source: Source | None = None
    lost: str = ""


@dataclass(frozen=True)
class Begun:
    """Where training starts.

    Attributes:
        progress: how far the run has come.
        lines: for the user.
        report: what was loaded from another run.
    """

    progress: Progress
    lines: list[str] = field(default_factory=list)
    report: LoadReport | None = None


def find_beginning(
    config: Config, folder: RunFolder, continued: bool, processes: Processes
) -> Found:
    """Look for checkpoints; all ranks must call it.

    Args:
        continued: whether the run in the folder is to be continued, if it has a checkpoint.

    Raises:
        RunFolderError, DataError: a checkpoint cannot be used.
    """

    def to_continue(newest: Path) -> Found:
        changed = changes(newest, config, processes)
        check_executed(config, folder.path)
        return Found(newest, read_manifest(newest).config, changed)

    newest = newest_whole(folder.checkpoints, processes) if continued else None
    if newest is not None:
        return processes.on_main(lambda: to_continue(newest))
    lost = processes.on_main(folder.begin_anew) if continued else ""
    given = config.checkpoint.init_from
    if not given:
        return Found(lost=lost)
    source = processes.on_main(lambda: open_source(given, folder.path), patience=PATIENCE)
    return Found(source=source, lost=lost)


def begin(found: Found, config: Config, job: Job, dataset: Dataset, processes: Processes) -> Begun:
    """Bring the job to where training starts; all ranks must call it.

    Raises:
        RunFolderError, DataError: what was found cannot be used for this job.
    """
    lines = [found.lost] if found.lost else []
    if found.newest is None:
        draw_rows_of_new_ids(config, dataset.rows_of_new_ids, job, processes)
    if found.source is not None:
        sizes = dataset.vocabulary_sizes
        report = load_matching(found.source, config, sizes, job, processes)
        takes_all = config.checkpoint.init_state == "all"
        before = read_manifest(found.source.checkpoint)
        if takes_all:
            _check_all_was_taken(report, before, config)
        what = "state" if takes_all else "weights"
        lines += [f"{what} from {report.checkpoint}, after step {report.step:,}", *report.lines()]
        return Begun(progress_after(before) if takes_all else Progress(), lines, report)
    if found.newest is None:
        return Begun(Progress(), [*lines, *_set_initial_bias(config, job, dataset, processes)])
    progress = load(found.newest, job, dataset)
    lines = [f"continuing after step {progress.step:,} from {found.newest}"]
    lines += [f"new setting: {line}" for line in found.changed]
    if config.checkpoint.init_from:
        lines.append("checkpoint.init_from is not used: the run has a checkpoint of its own")
    return Begun(progress, lines)


def _check_all_was_taken(report: LoadReport, before: Manifest, config: Config) -> None:
    """Refuse to go on with a model of which a part would begin anew or mean something else.

    Raises:
        RunFolderError: names the first such part.
    """
    other = [f"the table of {one.field!r}: {one.why}" for one in report.fields if one.why]
    other += [f"{name}: {why}" for name, why in report.new.items()]
    # Optimizers give their states the same names.
    was, now = before.config["optim"]["embedding"]["optimizer"], config.optim.embedding.optimizer
    if was != now:
        other.append(f"optim.embedding.optimizer was {was!r}, now {now!r}")
    if other:
        error = RunFolderError(
            f"checkpoint.init_state: found 'all', but this is another model than that of "
            f"{report.checkpoint} ({other[0]}); write the configuration that it was trained with, "
            "or begin anew"
        )
        error.known_to_all_ranks = True
        raise error


def _set_initial_bias(
    config: Config, job: Job, dataset: Dataset, processes: Processes
) -> list[str]:
    """Set a new run's bias as `model.initial_bias` says; lines for the user."""
    if config.model.initial_bias == "zero":
        return []
    share = processes.on_main(lambda: click_share(dataset.train), patience=PATIENCE)
    if share is None or not 0.0 < share < 1.0:
        return []
    log_odds = math.log(share / (1.0 - share))
    with torch.no_grad():
        job.ctr_model.bias.fill_(log_odds)
        if job.ctr_model.number_weights is not None:
            # Random ones would move the logits from there.
            job.ctr_model.number_weights.weight.zero_()
    return [f"bias begins at {log_odds:.3f}, the log odds of a click in training ({share:.2%})"]
