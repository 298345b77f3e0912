"""What a run folder holds, read without the data or a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stampede.engine.checkpoint import checkpoint_of, flat_keys, newest, read_manifest
from stampede.engine.errors import RunFolderError
from stampede.engine.run_folder import TRIALS, RunFolder
from stampede.settings import read_yaml

_HINT = "write a run folder such as runs/quickstart, or a folder of run folders"

# Keys that say how a run was started, logged or kept, not what it computed.
_NOT_COMPARED = (
    "run.name", "run.dir", "run.overwrite", "run.hang_seconds", "run.slow_hang_seconds",
    "checkpoint.", "train.log_every", "evaluate.compare_with_lr",
    "train.clip_stats_every", "train.timing_every", "train.profile.",
)  # fmt: skip


# What a report needs of a line of each kind, and of a summary.
_OF_A_LINE = {
    "train": ("step", "loss"),
    "evaluation": ("step", "part", "auc"),
    "clipping": ("step", "fields", "counts", "left_out"),
    "stopped": ("step", "reason"),
    "advice": ("step", "text"),
    "timing": (
        "step",
        "step_seconds",
        "phase_seconds",
        "communication_seconds",
        "slowest_seconds",
        "peak_memory_bytes",
    ),
}
_OF_A_SUMMARY = (
    "auc", "logloss", "best_auc", "best_epoch", "selected_on", "samples_per_second",
    "train_seconds", "epochs", "steps",
)  # fmt: skip


@dataclass(frozen=True)
class RunRecord:
    """What a run wrote.

    Attributes:
        path: the run folder.
        label: short name, different for each run of a report.
        config: values of `config.yaml` by dotted key.
        lines: lines of `metrics.jsonl`.
        summary: `summary.json`; empty where the run has not ended, or was continued since.
    """

    path: Path
    label: str
    config: dict[str, Any]
    lines: list[dict[str, Any]]
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self.config["train.batch_size"]

    @property
    def compared(self) -> dict[str, Any]:
        """The keys of the configuration that make one run different from another."""
        return {k: v for k, v in self.config.items() if not k.startswith(_NOT_COMPARED)}

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    def evaluations(self, part: str) -> list[dict[str, Any]]:
        """Evaluations of a part, in order."""
        return [line for line in self.of_kind("evaluation") if line["part"] == part]

    def samples_at(self, line: dict[str, Any]) -> int:
        """Samples trained on at a line, the last batch of an epoch taken for a whole one."""
        return line["step"] * self.batch_size

    def checkpoint(self) -> Path | None:
        """The checkpoint of the best epoch, or else the newest; None without any.

        Raises:
            RunFolderError: the newest is damaged.
        """
        folder = RunFolder(self.path).checkpoints
        last = newest(folder)
        if last is None:
            return None
        return checkpoint_of(folder, read_manifest(last).progress.best_epoch) or last

    def state(self) -> str | None:
        """What there is to say where the run has not ended; None where it has."""
        if self.summary:
            return None
        stops = self.of_kind("stopped")
        if not self.lines:
            return "has recorded nothing yet (no line in metrics.jsonl)"
        last = self.lines[-1]["step"]
        if stops and stops[-1]["step"] >= last:
            return f"stopped at step {last}: {stops[-1]['reason']}"
        lacks = "no summary.json"
        if RunFolder(self.path).summary.is_file():
            lacks = "it was continued after summary.json was written"
        return f"is not finished ({lacks}); what is shown ends at step {last:,}"


def open_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read runs, each once.

    Args:
        paths: run folders, folders of run folders, or those of sweeps.

    Raises:
        RunFolderError: there is no run, or what it wrote cannot be read.
        SettingsError: a `config.yaml` cannot be read.
    """
    folders = list(dict.fromkeys(run.resolve() for path in paths for run in _run_folders(path)))
    return [_read(path, label) for path, label in zip(folders, _labels(folders), strict=True)]


def _run_folders(path: Path) -> list[Path]:
    if not path.exists():
        raise RunFolderError(f"{path}: there is no such run folder; {_HINT}")
    if not path.is_dir():
        raise RunFolderError(f"{path}: is a file; {_HINT}")
    if RunFolder(path).config_file.is_file():
        return [path]
    # Folders whose name begins with a dot are being written or deleted.
    found = sorted(
        child
        for child in path.iterdir()
        if not child.name.startswith(".") and RunFolder(child).config_file.is_file()
    )
    if not found and (path / TRIALS).is_dir():
        return _run_folders(path / TRIALS)
    if not found:
        raise RunFolderError(
            f"{path}: holds no config.yaml, nor does a folder in it, so there is no run; {_HINT}"
        )
    return found


def _labels(folders: list[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart."""
    parts = 1
    while True:
        labels = ["/".join(folder.parts[-parts:]) for folder in folders]
        # Matplotlib leaves labels that begin with an underscore out of legends.
        labels = [f"./{label}" if label.startswith("_") else label for label in labels]
        if len(set(labels)) == len(labels):
            return labels
        parts += 1


def _read(path: Path, label: str) -> RunRecord:
    folder = RunFolder(path)
    config = flat_keys(read_yaml(folder.config_file, _HINT))
    if not isinstance(config.get("train.batch_size"), int):
        raise RunFolderError(
            f"{folder.config_file}: train.batch_size is absent or no whole number, so no run wrote "
            f"this file; {_HINT}"
        )
    try:
        lines = folder.lines()
        for line in lines:
            _check_keys(line, _OF_A_LINE.get(line["kind"], ("step",)))
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise RunFolderError(
            f"{folder.metrics}: is damaged ({_said(failure)}); repair the line or leave the run out"
        ) from None
    summary = {}
    if folder.summary.is_file():
        try:
            summary = json.loads(folder.summary.read_text(encoding="utf-8"))
            _check_keys(summary, _OF_A_SUMMARY)
        except (OSError, ValueError, KeyError, TypeError) as failure:
            raise RunFolderError(
                f"{folder.summary}: is damaged ({_said(failure)}); delete it to show the run as an "
                "unfinished one"
            ) from None
    if summary and lines and lines[-1]["step"] > summary["steps"]:
        summary = {}
    return RunRecord(path, label, config, lines, summary)


def _check_keys(values: dict[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        values[key]


def _said(failure: Exception) -> str:
    return f"no {failure}" if isinstance(failure, KeyError) else str(failure)
