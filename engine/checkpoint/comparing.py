"""What changed between a checkpoint and the run that continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stampede.engine.checkpoint.manifest import DataEntry, read_manifest
from stampede.engine.config import Config
from stampede.engine.config.load import with_defaults, without_gone_keys
from stampede.engine.config.presets import below_old_runs
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import Processes
from stampede.engine.recipe import open_keys
from stampede.settings import cut

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

# Of these, what says only how the run was started.
_NOT_WORTH_TELLING = (
    "run.name", "run.dir", "run.overwrite", "run.hang_seconds", "run.slow_hang_seconds",
    "model.initial_bias", "checkpoint.resume", "checkpoint.init_from",
)  # fmt: skip

# Of a thousand fields that differ, or keys that only a checkpoint has, the first tell enough.
_MOST_LINES = 20

# What a run that was changed can do instead.
_INSTEAD = "or begin a new run with its weights: another run.name, and checkpoint.init_from="


def changes(path: Path, config: Config, processes: Processes) -> list[str]:
    """What was harmlessly changed in the configuration since a checkpoint, line by line.

    Raises:
        RunFolderError: a change does not allow to continue, or the checkpoint is damaged.
    """
    manifest = read_manifest(path)
    saved = below_old_runs(without_gone_keys(manifest.config))
    before = flat_keys(with_defaults(saved, config))
    now = flat_keys(config.model_dump(mode="json"))
    for key in open_keys(config):
        # The run goes on with what the recipe gave it when it began.
        now[key] = before.get(key)
    differing = _differing(before, now)
    free = {key: line for key, line in differing.items() if key.startswith(_FREE)}
    harmful = _shortened({k: line for k, line in differing.items() if k not in free}, now)
    if harmful:
        raise RunFolderError(
            f"{path} cannot be continued with another configuration:\n"
            + "\n".join(f"  {line}" for line in harmful)
            + f"\nchange it back, {_INSTEAD}{path}"
        )
    worth_telling = {k: line for k, line in free.items() if k not in _NOT_WORTH_TELLING}
    harmless = _shortened(worth_telling, now)
    if manifest.world_size != processes.world_size:
        harmless.append(f"processes: {manifest.world_size} then, {processes.world_size} now")
    return harmless


def data_changes(saved: DataEntry, now: DataEntry) -> list[str]:
    """How the data differ from those of a checkpoint, line by line."""
    before, after = saved.model_dump(), now.model_dump()
    if saved.vocabulary_sha256 is None:
        del before["vocabulary_sha256"], after["vocabulary_sha256"]
    lines = [f"data: {line}" for line in _differing(flat_keys(before), flat_keys(after)).values()]
    return _first(lines, "data: ")


def check_same_data(path: Path, saved: DataEntry, now: DataEntry) -> None:
    """Refuse to continue a checkpoint on other data.

    Raises:
        RunFolderError: what differs.
    """
    lines = data_changes(saved, now)
    if not lines:
        return
    what = "ids or numbers of rows differ"
    if saved.model_copy(update={"vocabulary_sha256": now.vocabulary_sha256}) == now:
        what = "its tables have as many rows, but their ids or the ranges of numbers are others"
    raise RunFolderError(
        f"{path}: the checkpoint was made on other data ({what}):\n"
        + "\n".join(f"  {line}" for line in lines)
        + f"\nuse the same data, {_INSTEAD}{path}"
    )


def _shortened(lines: dict[str, str], now: dict[str, Any]) -> list[str]:
    """By key: all lines of the keys that there are now, and the first of those that are gone."""
    told = [line for key, line in lines.items() if key in now]
    return told + _first([line for key, line in lines.items() if key not in now])


def _first(lines: list[str], prefix: str = "") -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"{prefix}{more:,} more of this kind"]


def _differing(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """By key that differs, a line with both values."""
    return {
        key: f"{_plain(key)}: {before.get(key)!r:.200} in the checkpoint, {now.get(key)!r:.200} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


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
