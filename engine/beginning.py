"""What a run begins with: nothing, weights of another run, or its own newest checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stampede.data import Dataset, click_share
from stampede.engine.checkpoint import (
    Progress,
    changes,
    load,
    newest_whole,
    read_manifest,
    read_tensors,
)
from stampede.engine.checkpoint.comparing import Changes, data_changes, flat_keys
from stampede.engine.checkpoint.described import data_entry
from stampede.engine.checkpoint.random_state import set_random_state
from stampede.engine.checkpoint.same_network import network_difference
from stampede.engine.config import Config
from stampede.engine.errors import RunFolderError
from stampede.engine.job import Job
from stampede.engine.network_copy import check_executed
from stampede.engine.processes import PATIENCE, Processes
from stampede.engine.run_folder import RunFolder
from stampede.engine.warm_start.forcing import forced_progress
from stampede.engine.warm_start.loading import States, load_matching
from stampede.engine.warm_start.matching import Matching
from stampede.engine.warm_start.report import LoadReport
from stampede.engine.warm_start.source import Source, open_source, source_of

_OPTIMIZER = "optim.embedding.optimizer"
_NEW_RUN = "a new run's optimizers begin anew"


@dataclass(frozen=True)
class Found:
    """What there is to begin with, before data are read.

    Attributes:
        newest: checkpoint that the run continues; None for a run that begins.
        saved: the configuration of that checkpoint.
        changed: since then.
        source: what a run that begins takes weights from.
        lost: what is told of a run that was to be continued and begins anew; may be empty.
    """

    newest: Path | None = None
    saved: dict[str, Any] | None = None
    changed: Changes = field(default_factory=lambda: Changes([], []))
    source: Source | None = None
    lost: str = ""


@dataclass(frozen=True)
class Begun:
    """Where training starts.

    Attributes:
        progress: how far the run has come.
        lines: what is told of it.
        report: of what was loaded, where not all was; by name of its file.
        forced: whether the run goes on by `checkpoint.force`.
    """

    progress: Progress
    lines: list[str] = field(default_factory=list)
    report: tuple[str, LoadReport] | None = None
    forced: bool = False


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
    try:
        check_executed(config, folder.path)
    except RunFolderError as other:
        if not config.checkpoint.force:
            raise
        changed.harmful.append(str(other).partition(";")[0])
    return Found(newest, read_manifest(newest).config, changed)


def begin(found: Found, config: Config, job: Job, dataset: Dataset, processes: Processes) -> Begun:
    """Bring the job to where training starts; all ranks must call it.

    Raises:
        RunFolderError, DataError: what was found cannot be used for this job.
    """
    told = [found.lost] if found.lost else []
    if found.source is not None:
        matching = Matching(found.source, config, dataset.vocabulary_sizes)
        report = load_matching(found.source, matching, job, processes, States(_NEW_RUN, _NEW_RUN))
        told += [f"weights from {report.checkpoint}, after step {report.step:,}", *report.lines()]
        return Begun(Progress(), told, ("init_from.json", report))
    if found.newest is None:
        return Begun(Progress(), [*told, *_set_initial_bias(config, job, dataset, processes)])
    harmful = [*found.changed.harmful]
    if config.checkpoint.force:
        harmful += _of_data_and_network(found.newest, job, dataset)
    if harmful:
        return _by_force(found, harmful, config, job, dataset, processes)
    progress = load(found.newest, job, dataset)
    lines = [f"continuing after step {progress.step:,} from {found.newest}"]
    lines += [f"changed since then: {line}" for line in found.changed.harmless]
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


def _of_data_and_network(path: Path, job: Job, dataset: Dataset) -> list[str]:
    """What `load` would refuse, on all ranks the same."""
    manifest = read_manifest(path)
    lines = data_changes(manifest.data, data_entry(dataset))
    other = network_difference(manifest, job.model.state_dict())
    # A rank may have no part of a table that differs.
    said = [other] * dist.get_world_size()
    dist.all_gather_object(said, other)
    others = [f"network: {text}" for text in said if text]
    return lines or others[:1]


def _by_force(
    found: Found,
    harmful: list[str],
    config: Config,
    job: Job,
    dataset: Dataset,
    processes: Processes,
) -> Begun:
    newest = found.newest
    manifest = read_manifest(newest)
    source = processes.on_main(lambda: source_of(newest), patience=PATIENCE)
    was, now = (
        flat_keys(values).get(_OPTIMIZER)
        for values in (manifest.config, config.model_dump(mode="json"))
    )
    reason = None if was == now else f"{_OPTIMIZER} was {was}, now {now}"
    scale, scale_now = manifest.first_order_scale, job.ctr_model.first_order_scale
    if scale != scale_now:
        # Moments are those of gradients that it multiplied.
        reason = f"model.first_order_scale was {scale:g}, now {scale_now:g}"
    states = States(tables=reason, dense=None if scale == scale_now else reason)
    matching = Matching(source, config, dataset.vocabulary_sizes)
    report = load_matching(source, matching, job, processes, states)
    if states.tables is None:
        # FBGEMM's own Adam counts its steps outside of its state.
        taken = manifest.progress.step - manifest.progress.skipped_batches
        job.model.fused_optimizer.set_optimizer_step(taken)
    if manifest.world_size == processes.world_size:
        generator = torch.get_rng_state()
        read_tensors(newest, {f"random.rank_{processes.rank}": generator})
        set_random_state(newest, generator)
    progress, moved = forced_progress(manifest.progress, config, dataset)
    lines = [
        f"FORCED (checkpoint.force): continuing after step {progress.step:,} from {newest} "
        "although it does not fit:",
        *(f"  CHANGED {line}" for line in harmful),
        *(f"  changed {line}" for line in found.changed.harmless),
        *(f"  {line}" for line in moved),
        *report.lines(),
    ]
    return Begun(progress, lines, ("forced.json", report), forced=True)
