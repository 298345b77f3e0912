"""What a run begins with: nothing, weights of another run, or its own newest checkpoint."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stampede.data import Dataset, click_shares
from stampede.engine.checkpoint.hosts import on_every_host
from stampede.engine.checkpoint.manifest import Manifest, data_entry, read_manifest
from stampede.engine.checkpoint.pretrained import fill_pretrained
from stampede.engine.checkpoint.retention import newest_whole
from stampede.engine.checkpoint.tensors import check_same_network, on_cpu, read_tensors
from stampede.engine.checkpoint.warm_start import (
    LoadReport,
    Source,
    draw_rows_of_new_ids,
    load_matching,
    open_source,
)
from stampede.engine.config import Config
from stampede.engine.config.load import with_defaults
from stampede.engine.config.presets import flat_keys
from stampede.engine.config.recipe import open_keys
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.kept import check_executed
from stampede.engine.job import Job
from stampede.engine.processes import Processes
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.training.progress import Progress

# Sections and keys that may differ between a checkpoint and the run that continues it.
_FREE = ("model.import", "model.initial_bias", "model.pretrained",
         "optim.embedding.lr", "optim.embedding.schedule.",
         "optim.embedding.plateau.",
         "optim.embedding.on_nonfinite", "optim.dense.lr", "optim.dense.schedule.",
         "optim.dense.plateau.", "run.name", "run.dir", "run.device", "run.kernels",
         "run.overwrite", "run.quiet", "run.hang_seconds", "run.slow_hang_seconds",
         "data.path", "data.cache", "data.cache_gb", "data.spark",
         "data.residence", "data.memory_gb", "train.epochs", "train.log_every",
         "train.compile", "train.on_nonfinite", "train.timing_every", "train.profile.",
         "train.negative_rate",
         "evaluate.batch_size", "evaluate.every", "evaluate.every_epochs", "evaluate.patience",
         "evaluate.metrics", "evaluate.calibrate", "evaluate.group_by", "evaluate.compare_with_",
         "checkpoint.", "sharding.")  # fmt: skip

# Moments of a frozen table do not exist.
_FREEZES = re.compile(r"model\.pretrained\..+\.train")

# Keys that only say how the run was started.
_NOT_WORTH_TELLING = (
    "run.name", "run.dir", "run.overwrite", "run.quiet", "run.hang_seconds",
    "run.slow_hang_seconds",
    "model.initial_bias", "checkpoint.resume", "checkpoint.init_from",
)  # fmt: skip

# What the user of a changed run can do instead.
_INSTEAD = "or start a new run with its weights: write another run.name, and checkpoint.init_from="


@dataclass(frozen=True)
class Found:
    """What a run can start from; known before data are read.

    Attributes:
        newest: the checkpoint to continue; None for a new run.
        saved: its configuration.
        source: of the weights of a new run.
        lines: for the user: changed settings, or what a run without a checkpoint loses.
    """

    newest: Path | None = None
    saved: dict[str, Any] | None = None
    source: Source | None = None
    lines: list[str] = field(default_factory=list)


def find_beginning(
    config: Config, folder: RunFolder, continued: bool, processes: Processes
) -> Found:
    """Look for checkpoints, the run's own if it is `continued`; all ranks must call it.

    Raises:
        RunFolderError, DataError: a checkpoint cannot be used.
    """

    def to_continue(newest: Path) -> Found:
        lines = [f"new setting: {line}" for line in changes(newest, config, processes)]
        check_executed(config, folder.path)
        return Found(newest, read_manifest(newest).config, lines=lines)

    lost = ""
    if continued:
        newest = processes.on_main(lambda: newest_whole(folder.checkpoints))
        if newest is not None:
            return processes.on_main(lambda: to_continue(newest))
        lost = processes.on_main(folder.begin_anew)
    given, source = config.checkpoint.init_from, None
    if given:
        source = processes.on_main(lambda: open_source(given, folder.path))
    return Found(source=source, lines=[lost] if lost else [])


def begin(
    found: Found, config: Config, job: Job, dataset: Dataset, processes: Processes
) -> tuple[Progress, list[str], LoadReport | None]:
    """Put the job into the state in which training starts; all ranks must call it.

    Returns the progress, lines for the user, and a report on weights of another run.

    Raises:
        RunFolderError, DataError: the checkpoint or weights do not fit this job.
    """
    filled, report = [], None
    if found.newest is None:
        draw_rows_of_new_ids(config, dataset.rows_of_new_ids, job, processes)
        # What another run has learned since counts more than vectors of a file, but not in a
        # frozen table, whose vectors are all of one kind.
        filled = fill_pretrained(config, job, dataset, processes, frozen=False)
        if found.source is not None:
            with on_every_host(found.source.checkpoint, processes) as checkpoint:
                source = replace(found.source, checkpoint=checkpoint)
                before = read_manifest(checkpoint)
                report = load_matching(source, config, dataset.vocabulary_sizes, job, processes)
        filled += fill_pretrained(config, job, dataset, processes, frozen=True)
    if report is not None:
        if found.source.held is not None:
            found.source.held.close()
        takes_all, shifted = config.checkpoint.init_state == "all", []
        if takes_all:
            _check_all_was_taken(report, before, config)
        else:
            shifted = _shift_biases(report, before, config, job)
        what = "state" if takes_all else "weights"
        loaded = f"{what} from {report.checkpoint}, after step {report.step:,}"
        # Schedules and rates continue.
        kept = ("step", "skipped_batches", "plateau", "table_plateau")
        kept = {name: getattr(before.progress, name) for name in kept if takes_all}
        lines = [*found.lines, loaded, *report.lines(), *shifted, *filled]
        return Progress(**kept), lines, report
    if found.newest is None:
        lines = [*found.lines, *filled, *_set_initial_bias(config, job, dataset, processes)]
        return Progress(), lines, None
    with on_every_host(found.newest, processes) as checkpoint:
        progress = load(checkpoint, job, dataset)
    lines = [f"continuing after step {progress.step:,} from {found.newest}"]
    if progress.epoch >= config.train.epochs:
        lines.append(
            f"all {config.train.epochs} epochs are already trained; to train more, raise "
            "train.epochs"
        )
    lines += found.lines
    if config.checkpoint.init_from:
        lines.append("checkpoint.init_from is not used: the run has its own checkpoint")
    return progress, lines, None


@torch.no_grad()
def _shift_biases(report: LoadReport, before: Manifest, config: Config, job: Job) -> list[str]:
    """Let loaded biases begin where another share of negatives puts the logits, see `corrected`.

    That is exact for a single label and the first goal, and nearly so for others that are rare.
    Returns a line for the user if they moved.
    """
    was, now = before.config.get("train", {}).get("negative_rate", 1.0), config.train.negative_rate
    if "model.bias" not in report.loaded or was == now:
        return []
    model, shift = job.ctr_model, math.log(was / now)
    # What follows a click has the same odds with any number of others.
    shifted = model.bias[:1] if hasattr(model.network, "combined") else model.bias
    shifted += shift
    return [f"bias moved by {shift:.3f}, as train.negative_rate was {was:g} and is {now:g}"]


def _check_all_was_taken(report: LoadReport, before: Manifest, config: Config) -> None:
    """Refuse a model if a part of it would start from scratch or change its meaning."""
    other = [f"the table of {one.field!r}: {one.why}" for one in report.fields if one.why]
    other += [f"{name}: {why}" for name, why in report.new.items()]
    # Different optimizers use the same names for their states.
    was, now = before.config["optim"]["embedding"]["optimizer"], config.optim.embedding.optimizer
    if was != now:
        other.append(f"optim.embedding.optimizer was {was!r}, now {now!r}")
    # Frozen tables have no moments.
    given = before.config["model"].get("pretrained", {})
    froze = {name for name, one in given.items() if isinstance(one, dict) and not one["train"]}
    for name in sorted(froze ^ config.model.frozen):
        was, now = (name not in frozen for frozen in (froze, config.model.frozen))
        other.append(f"model.pretrained.{name}.train was {was}, now {now}")
    if other:
        error = RunFolderError(
            "checkpoint.init_state: found 'all', but the model differs from the one in "
            f"{report.checkpoint} ({other[0]}); restore the configuration of that model, or start "
            "over"
        )
        error.known_to_all_ranks = True
        raise error


def _set_initial_bias(
    config: Config, job: Job, dataset: Dataset, processes: Processes
) -> list[str]:
    """Set a new run's bias by `model.initial_bias`; returns lines for the user."""
    if config.model.initial_bias == "zero":
        return []
    shares = processes.on_main(lambda: [of.share for of in click_shares(dataset.train)])
    if not all(shares):
        return []
    separated = getattr(job.ctr_model.network, "separated", None)
    means = separated(shares) if separated else shares
    if max(means) >= 1.0:
        if separated:
            first, second = dataset.goals
            return [
                f"biases begin at 0: {second} ({shares[1]:.2%}) is more frequent than {first} "
                f"({shares[0]:.2%}), but {config.model.name} takes it for what follows {first}; "
                "write the click first in the schema's label"
            ]
        return []
    biases = [math.log(mean / (1.0 - mean)) for mean in means]
    with torch.no_grad():
        job.ctr_model.bias.copy_(torch.tensor(biases))
        if job.ctr_model.number_weights is not None:
            # Random first-order weights would shift the logits.
            job.ctr_model.number_weights.weight.zero_()
    if not dataset.goals:
        log_odds, share = biases[0], shares[0]
        return [f"bias begins at {log_odds:.3f}, the log odds of a click in training ({share:.2%})"]
    told = ", ".join(f"{n} {share:.2%}" for n, share in zip(dataset.goals, shares, strict=True))
    return [f"biases begin at the log odds of the goals in training ({told})"]


def changes(path: Path, config: Config, processes: Processes) -> list[str]:
    """The allowed changes of the configuration since a checkpoint, one line each.

    Raises:
        RunFolderError: a change is not allowed, or the checkpoint is damaged.
    """
    manifest = read_manifest(path)
    before = flat_keys(with_defaults(manifest.config))
    now = flat_keys(config.model_dump(mode="json"))
    for key in open_keys(config):
        # The run keeps what the recipe chose when it began.
        now[key] = before.get(key)
    differing = _differing(before, now)
    harmful = [
        line
        for key, line in differing.items()
        if not key.startswith(_FREE) or _FREEZES.fullmatch(key)
    ]
    if harmful:
        raise RunFolderError(
            f"{path} cannot be continued with another configuration:\n"
            + "\n".join(f"  {line}" for line in harmful)
            + f"\nchange it back, {_INSTEAD}{path}"
        )
    harmless = [
        f"{key}={now.get(key)!r:.200} (was {before.get(key)!r:.200})"
        for key in differing
        if key not in _NOT_WORTH_TELLING
    ]
    if manifest.world_size != processes.world_size:
        harmless.append(f"{processes.world_size} processes (was {manifest.world_size})")
    return harmless


def _differing(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """A line with both values for each key that differs."""
    return {
        key: f"{key}: {before.get(key)!r:.200} in the checkpoint, {now.get(key)!r:.200} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


def load(path: Path, job: Job, dataset: Dataset) -> Progress:
    """Load a checkpoint of any plan and number of ranks into the job; returns its progress.

    The state of torch's CPU random generator is restored if the number of ranks is the same.
    All ranks must call it.

    Raises:
        RunFolderError: the checkpoint is damaged, or belongs to another job or network.
    """
    manifest = read_manifest(path)
    data = (flat_keys(entry.model_dump()) for entry in (manifest.data, data_entry(dataset)))
    if lines := _differing(*data).values():
        raise RunFolderError(
            f"{path}: the checkpoint was trained on other data (vocabulary_sha256 stands for ids "
            "and ranges of numbers):\n"
            + "\n".join(f"  data: {line}" for line in lines)
            + f"\nuse the same data, {_INSTEAD}{path}"
        )
    if any(name.startswith("mean.") for name in manifest.tensors):
        job.mean = on_cpu(job.model.state_dict(), copy=True)
    state = job.state(dist.get_rank())
    check_same_network(path, manifest, state["model"])
    if manifest.world_size != dist.get_world_size():
        del state["random"]
    read_tensors(path, state)
    job.model.load_state_dict(state["model"])
    # FBGEMM's own Adam counts its steps outside of its state.
    job.model.fused_optimizer.set_optimizer_step(manifest.progress.updates)
    for generator_state in state.get("random", {}).values():
        torch.set_rng_state(generator_state)
    return manifest.progress
