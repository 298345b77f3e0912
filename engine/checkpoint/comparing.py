"""What changed between a checkpoint and the run that continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.config import Config
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import Processes
from stampede.settings import cut

# Sections and keys that may differ between a checkpoint and the run that continues it.
_FREE = ("model.import", "optim.embedding.lr", "optim.embedding.schedule.", "optim.dense.lr",
         "optim.dense.schedule.", "optim.dense.plateau.", "run.name", "run.dir", "run.device",
         "run.overwrite", "run.hang_seconds", "data.path", "data.cache", "data.residence",
         "data.memory_gb", "train.epochs", "train.log_every", "train.clip_stats_every",
         "train.on_nonfinite", "train.on_divergence.", "evaluate.batch_size", "evaluate.every",
         "evaluate.every_epochs", "evaluate.patience", "evaluate.metrics", "evaluate.group_by",
         "evaluate.memory_gb", "checkpoint.", "sharding.")  # fmt: skip

# Of these, what says only how the run was started.
_NOT_WORTH_TELLING = (
    "run.name", "run.dir", "run.overwrite", "run.hang_seconds", "checkpoint.resume"
)  # fmt: skip


def changes(path: Path, config: Config, processes: Processes) -> list[str]:
    """What was changed in the configuration since a checkpoint, line by line.

    Raises:
        RunFolderError: a change does not allow to continue, or the checkpoint is damaged.
    """
    manifest = read_manifest(path)
    changed = _check_same_job(path, manifest.config, config)
    if manifest.world_size != processes.world_size:
        changed.append(f"processes: {manifest.world_size} then, {processes.world_size} now")
    return changed


def _check_same_job(path: Path, saved: dict[str, Any], config: Config) -> list[str]:
    """The harmless changes; raises RunFolderError for others."""
    before, now = flat_keys(saved), flat_keys(config.model_dump(mode="json"))
    differing = {
        key: f"{_plain(key)}: {before.get(key)!r:.200} in the checkpoint, {now.get(key)!r:.200} now"
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


def _plain(key: str) -> str:
    """A key of a checkpoint that may be from elsewhere, as a line shows it."""
    return cut(f"{key:.200}").replace("\n", "\\n")


def flat_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Values of nested sections by dotted key, such as `train.batch_size`."""
    if not isinstance(values, dict):
        return {prefix[:-1]: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(flat_keys(value, f"{prefix}{key}."))
    return flat
