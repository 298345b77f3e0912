"""Checkpoints: tables, dense layers, both optimizers, position, configuration."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from stampede.data import Dataset
from stampede.engine.config import Config
from stampede.engine.console import readable_bytes
from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.job import Job
from stampede.engine.processes import Processes
from stampede.engine.run_folder import to_json
from stampede.models import StoredColumns, table_name

_MANIFEST = "manifest.json"

# Sections and keys that may differ between a checkpoint and the run that continues it.
_FREE = ("model.import", "optim.embedding.lr", "optim.embedding.schedule.", "optim.dense.lr",
         "optim.dense.schedule.", "optim.dense.plateau.", "run.name", "run.dir", "run.device",
         "run.overwrite", "data.path", "data.cache", "data.residence", "data.memory_gb",
         "train.epochs", "train.log_every", "train.clip_stats_every", "evaluate.batch_size",
         "evaluate.every", "evaluate.every_epochs", "evaluate.patience", "evaluate.metrics",
         "evaluate.group_by", "evaluate.memory_gb", "checkpoint.", "sharding.")  # fmt: skip

# Of these, what says only how the run was started.
_NOT_WORTH_TELLING = ("run.name", "run.dir", "run.overwrite", "checkpoint.resume")


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        epoch: epochs finished.
        reader: state of the `Reader`'s training batches; nothing before the first checkpoint.
        step: steps taken.
        samples: samples trained on.
        train_seconds: time spent in training, without evaluation and checkpoints.
        touched_rows, clipped_rows, skipped_rows: rows of all batches so far, those that were
            clipped, and those left out for a gradient that was not finite.
        best_epoch: epoch with the best AUC on the selecting part, counted from 1; 0 for none.
        best_score: that AUC; None where it is undefined.
        best_auc: AUC on the test part in that epoch.
        waited: evaluated epochs since that were no better.
        plateau: state of the dense layers' rate, see `stampede.engine.selection.Plateau`.
        last: newest evaluation of the test part.
    """

    epoch: int = 0
    reader: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    samples: int = 0
    train_seconds: float = 0.0
    touched_rows: int = 0
    clipped_rows: int = 0
    skipped_rows: int = 0
    best_epoch: int = 0
    best_score: float | None = None
    best_auc: float | None = None
    waited: int = 0
    plateau: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)


def save(
    folder: Path,
    job: Job,
    progress: Progress,
    config: Config,
    dataset: Dataset,
    processes: Processes,
) -> None:
    """Write a checkpoint of the epoch just finished; it appears whole or not at all.

    Raises:
        TrainingStoppedError: it cannot be written.
    """
    target = folder / _name(progress.epoch)
    unfinished = folder / f".{target.name}.tmp"
    processes.on_main(lambda: shutil.rmtree(unfinished, ignore_errors=True))
    manifest = {
        "progress": asdict(progress),
        "config": config.model_dump(mode="json"),
        "tables": _table_manifest(dataset, config),
        "data": _fingerprint(dataset),
        "world_size": processes.world_size,
    }

    def publish() -> None:
        (unfinished / _MANIFEST).write_text(to_json(manifest, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(unfinished, target)
        _prune(folder, config.checkpoint.keep, progress.best_epoch)

    try:
        # Fails on all ranks if it fails on one.
        dcp.save(_state(job), checkpoint_id=str(unfinished))
        processes.on_main(publish)
    except (CheckpointException, OSError) as failure:
        shutil.rmtree(unfinished, ignore_errors=True)
        free = readable_bytes(shutil.disk_usage(folder).free)
        raise TrainingStoppedError(
            f"{target}: the checkpoint cannot be written, {free} are free there "
            f"({_reason(failure)}); earlier ones are untouched. Make room and continue with "
            "checkpoint.resume=auto"
        ) from None


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a run's `checkpoints` folder."""
    return max((path.parent for path in folder.glob(f"epoch_*/{_MANIFEST}")), default=None)


def checkpoint_of(folder: Path, epoch: int) -> Path | None:
    """The whole checkpoint of an epoch in a run's `checkpoints` folder, if it is there."""
    path = folder / _name(epoch)
    return path if (path / _MANIFEST).is_file() else None


def changes(path: Path, config: Config, processes: Processes) -> list[str]:
    """What was changed in the configuration since a checkpoint, line by line.

    Raises:
        RunFolderError: a change does not allow to continue, or the checkpoint is damaged.
    """
    manifest = read_manifest(path)
    changed = _check_same_job(path, manifest["config"], config)
    if manifest["world_size"] != processes.world_size:
        changed.append(f"processes: {manifest['world_size']} then, {processes.world_size} now")
    return changed


def load(path: Path, job: Job, dataset: Dataset) -> Progress:
    """Put a checkpoint into the job, whatever its plan and number of ranks were.

    Returns:
        How far the run had come.

    Raises:
        RunFolderError: it is damaged, or belongs to another job.
    """
    manifest = read_manifest(path)
    if manifest["data"] != _fingerprint(dataset):
        raise RunFolderError(
            f"{path}: the checkpoint was made on other data (ids or numbers of rows differ); "
            "use the same data, or another run.name"
        )
    state = _state(job)
    read_tensors(path, state)
    job.model.load_state_dict(state["model"])
    # FBGEMM's own Adam counts its steps outside of its state.
    job.model.fused_optimizer.set_optimizer_step(manifest["progress"].step)
    return manifest["progress"]


def read_tensors(path: Path, state: dict[str, Any], *, alone: bool = False) -> None:
    """Fill tensors from a checkpoint, whatever its plan and number of ranks were.

    Args:
        path: the checkpoint.
        state: tensors as `save` wrote them, or some of them; written in place.
        alone: whether this process reads alone; else all ranks must call it.

    Raises:
        RunFolderError: the checkpoint is damaged or lacks one of them.
    """
    try:
        with warnings.catch_warnings():
            # That no process group is there is as it should be.
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, checkpoint_id=str(path), no_dist=alone)
    except (CheckpointException, OSError, ValueError, RuntimeError) as failure:
        raise RunFolderError(
            f"{path}: damaged checkpoint ({_reason(failure)}); delete it to use the one before"
        ) from None


def read_manifest(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest with its parts checked to be there, the progress as `Progress`.

    Raises:
        RunFolderError: it is damaged, or no checkpoint.
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        manifest["progress"] = Progress(**manifest["progress"])
        for part in ("config", "data", "world_size"):
            manifest[part]
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise RunFolderError(f"{path}: damaged checkpoint ({failure}); delete it") from None
    return manifest


def _state(job: Job) -> dict[str, Any]:
    """Everything trained, as tensors that are read and written in place."""
    return {
        "model": job.model.state_dict(),
        "fused": job.model.fused_optimizer.state_dict()["state"],
        "dense": {
            name: job.dense_optimizer.state[parameter]
            for name, parameter in job.dense_parameters.items()
        },
    }


def _name(epoch: int) -> str:
    return f"epoch_{epoch:04d}"


def _prune(folder: Path, keep: int, best_epoch: int) -> None:
    whole = sorted(path.parent for path in folder.glob(f"epoch_*/{_MANIFEST}"))
    for path in whole[:-keep]:
        if path.name != _name(best_epoch):
            shutil.rmtree(path, ignore_errors=True)


def _table_manifest(dataset: Dataset, config: Config) -> dict[str, Any]:
    """Names the columns of the stored rows: `[first, one past the last]`."""
    columns = StoredColumns(config.model.dim)
    return {
        table_name(field): {"field": field, "rows": rows, "columns": columns.names}
        for field, rows in dataset.vocabulary_sizes.items()
    }


def _fingerprint(dataset: Dataset) -> dict[str, Any]:
    return {
        "vocabulary_sizes": dict(dataset.vocabulary_sizes),
        "numbers": dataset.numbers,
        "train_rows": dataset.train.rows,
        "test_rows": dataset.test.rows,
    }


def _check_same_job(path: Path, saved: dict[str, Any], config: Config) -> list[str]:
    """The harmless changes; raises RunFolderError for others."""
    before, now = flat_keys(saved), flat_keys(config.model_dump(mode="json"))
    differing = {
        key: f"{key}: {before.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }
    harmful = [f"  {line}" for key, line in differing.items() if not key.startswith(_FREE)]
    if harmful:
        raise RunFolderError(
            f"{path} cannot be continued with another configuration:\n"
            + "\n".join(harmful)
            + "\nchange it back, or choose another run.name"
        )
    return [line for key, line in differing.items() if key not in _NOT_WORTH_TELLING]


def flat_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Values of nested sections by dotted key, such as `train.batch_size`."""
    if not isinstance(values, dict):
        return {prefix[:-1]: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(flat_keys(value, f"{prefix}{key}."))
    return flat


def _reason(failure: BaseException) -> str:
    if isinstance(failure, CheckpointException) and failure.failures:
        failure = next(iter(failure.failures.values()))[0]
    return str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
