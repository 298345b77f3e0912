"""Load a checkpoint into a job whose data, network and configuration match it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stampede.data import Dataset
from stampede.engine.checkpoint.manifest import (
    DataEntry,
    Manifest,
    Progress,
    data_entry,
    read_manifest,
)
from stampede.engine.checkpoint.tensors import contents, read_tensors
from stampede.engine.config import Config
from stampede.engine.config.load import with_defaults, without_gone_keys
from stampede.engine.config.presets import below_old_runs
from stampede.engine.errors import RunFolderError
from stampede.engine.job import Job
from stampede.engine.processes import Processes
from stampede.engine.recipe import open_keys

# Prefix of the names of table tensors; a process may hold only some of them.
TABLES = "front."

# Sections and keys that may differ between a checkpoint and the run that continues it.
_FREE = ("model.import", "model.initial_bias", "optim.embedding.lr", "optim.embedding.schedule.",
         "optim.embedding.plateau.",
         "optim.embedding.on_nonfinite", "optim.dense.lr", "optim.dense.schedule.",
         "optim.dense.plateau.", "run.name", "run.dir", "run.device", "run.overwrite",
         "run.hang_seconds", "run.slow_hang_seconds", "data.path", "data.cache", "data.residence",
         "data.memory_gb", "train.epochs", "train.log_every", "train.clip_stats_every",
         "train.compile", "train.on_nonfinite", "train.on_divergence.", "train.timing_every",
         "train.profile.",
         "evaluate.batch_size", "evaluate.every", "evaluate.every_epochs", "evaluate.patience",
         "evaluate.metrics", "evaluate.group_by", "evaluate.compare_with_lr", "checkpoint.",
         "sharding.")  # fmt: skip

# Keys that only say how the run was started.
_NOT_WORTH_TELLING = (
    "run.name", "run.dir", "run.overwrite", "run.hang_seconds", "run.slow_hang_seconds",
    "model.initial_bias", "checkpoint.resume", "checkpoint.init_from",
)  # fmt: skip

# What the user of a changed run can do instead.
_INSTEAD = "or start a new run with its weights: write another run.name, and checkpoint.init_from="


def load(path: Path, job: Job, dataset: Dataset) -> Progress:
    """Load a checkpoint of any plan and number of ranks into the job.

    The state of torch's CPU random generator is restored if the number of ranks is the same.
    All ranks must call it.

    Returns:
        The progress of the run at the checkpoint.

    Raises:
        RunFolderError: the checkpoint is damaged, or belongs to another job or network.
    """
    manifest = read_manifest(path)
    _check_same_data(path, manifest.data, data_entry(dataset))
    state = contents(job, dist.get_rank())
    check_same_network(path, manifest, state["model"])
    if manifest.world_size != dist.get_world_size():
        del state["random"]
    read_tensors(path, state)
    job.model.load_state_dict(state["model"])
    # FBGEMM's own Adam counts its steps outside of its state.
    job.model.fused_optimizer.set_optimizer_step(manifest.progress.table_steps)
    for generator_state in state.get("random", {}).values():
        torch.set_rng_state(generator_state)
    return manifest.progress


def check_same_network(path: Path, manifest: Manifest, model: Mapping[str, Tensor]) -> None:
    """Refuse a model other than the trained one, before anything is read into it.

    Args:
        path: the checkpoint, for the message.
        manifest: its manifest.
        model: the model's `state_dict`; tensors may be sharded and on any device.

    Raises:
        RunFolderError: a tensor is missing on one side, or the sizes differ.
    """
    now = {name: list(tensor.size()) for name, tensor in model.items()}
    saved = {
        name.removeprefix("model."): entry.size
        for name, entry in manifest.tensors.items()
        if name.startswith("model.")
    }
    for name in [*now, *(name for name in saved if not name.startswith(TABLES))]:
        if saved.get(name) != now.get(name):
            raise RunFolderError(
                f"{path}: the network differs from the trained one ({name}: "
                f"{saved.get(name, 'absent')} in the checkpoint, {now.get(name, 'absent')} now). "
                "Keep the checkpoint, which is intact; restore the configuration's section model "
                "and the file of model.import, or train from scratch with another run.name"
            )


def _check_same_data(path: Path, saved: DataEntry, now: DataEntry) -> None:
    """Refuse to continue a checkpoint on other data."""
    before, after = saved.model_dump(), now.model_dump()
    if saved.vocabulary_sha256 is None:
        del before["vocabulary_sha256"], after["vocabulary_sha256"]
    lines = list(_differing(flat_keys(before), flat_keys(after)).values())
    if lines:
        raise RunFolderError(
            f"{path}: the checkpoint was trained on other data (vocabulary_sha256 stands for ids "
            "and ranges of numbers):\n"
            + "\n".join(f"  data: {line}" for line in lines)
            + f"\nuse the same data, {_INSTEAD}{path}"
        )


def changes(path: Path, config: Config, processes: Processes) -> list[str]:
    """The allowed changes of the configuration since a checkpoint, one line each.

    Raises:
        RunFolderError: a change is not allowed, or the checkpoint is damaged.
    """
    manifest = read_manifest(path)
    saved = below_old_runs(without_gone_keys(manifest.config))
    before = flat_keys(with_defaults(saved, config))
    now = flat_keys(config.model_dump(mode="json"))
    for key in open_keys(config):
        # The run keeps what the recipe chose when it began.
        now[key] = before.get(key)
    differing = _differing(before, now)
    harmful = [line for key, line in differing.items() if not key.startswith(_FREE)]
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


def flat_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Values of nested sections by dotted key, such as `train.batch_size`."""
    if not isinstance(values, dict):
        return {prefix[:-1]: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(flat_keys(value, f"{prefix}{key}."))
    return flat
