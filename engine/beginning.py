"""What a run begins with: nothing, weights of another run, or its own newest checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stampede.data import Dataset, click_share
from stampede.engine.checkpoint import changes, load, newest_whole, read_manifest
from stampede.engine.checkpoint.progress import Progress
from stampede.engine.config import Config
from stampede.engine.job import Job
from stampede.engine.network_copy import check_executed
from stampede.engine.processes import PATIENCE, Processes
from stampede.engine.run_folder import RunFolder
from stampede.engine.warm_start.loading import load_matching
from stampede.engine.warm_start.matching import Matching
from stampede.engine.warm_start.report import LoadReport
from stampede.engine.warm_start.source import Source, open_source


@dataclass(frozen=True)
class Found:
    """What there is to begin with, before data are read.

    Attributes:
        newest: checkpoint that the run continues; None for a run that begins.
        saved: the configuration of that checkpoint.
        changed: since then, line by line.
        source: what a run that begins takes weights from.
        lost: what is told of a run that was to be continued and begins anew; may be empty.
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
        lines: what is told of it.
        report: of what was loaded from another run.
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
    newest = newest_whole(folder.checkpoints, processes) if continued else None
    if newest is not None:
        return processes.on_main(lambda: _found(newest, config, folder, processes))
    lost = processes.on_main(folder.begin_anew) if continued else ""
    given = config.checkpoint.init_from
    if not given:
        return Found(lost=lost)
    source = processes.on_main(lambda: open_source(given, folder.path), patience=PATIENCE)
    return Found(source=source, lost=lost)


def _found(newest: Path, config: Config, folder: RunFolder, processes: Processes) -> Found:
    changed = changes(newest, config, processes)
    check_executed(config, folder.path)
    return Found(newest, read_manifest(newest).config, changed)


def begin(found: Found, config: Config, job: Job, dataset: Dataset, processes: Processes) -> Begun:
    """Bring the job to where training starts; all ranks must call it.

    Raises:
        RunFolderError, DataError: what was found cannot be used for this job.
    """
    told = [found.lost] if found.lost else []
    if found.source is not None:
        matching = Matching(found.source, config, dataset.vocabulary_sizes)
        report = load_matching(found.source, matching, job, processes)
        told += [f"weights from {report.checkpoint}, after step {report.step:,}", *report.lines()]
        return Begun(Progress(), told, report)
    if found.newest is None:
        return Begun(Progress(), [*told, *_set_initial_bias(config, job, dataset, processes)])
    progress = load(found.newest, job, dataset)
    lines = [f"continuing after step {progress.step:,} from {found.newest}"]
    lines += [f"changed since then: {line}" for line in found.changed]
    if config.checkpoint.init_from:
        lines.append("checkpoint.init_from is not used: the run has a checkpoint of its own")
    return Begun(progress, lines)


def _set_initial_bias(
    config: Config, job: Job, dataset: Dataset, processes: Processes
) -> list[str]:
    """Let a new run's bias be what `model.initial_bias` says; what is told of it."""
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
