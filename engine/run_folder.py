"""The folder of a run: configuration, metrics, summary, curve, checkpoints."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from stampede.engine.config import Config, to_yaml
from stampede.engine.errors import RunFolderError, TrainingStoppedError

_CONFIG = "config.yaml"


class RunFolder:
    """Files of one run; only rank 0 writes, and opens it.

    Args:
        path: the folder, made by `claim`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._board: SummaryWriter | None = None

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Every logged line, as JSON."""
        return self.path / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        """Picture of the learning curve."""
        return self.path / "curve.png"

    def claim(self, config: Config) -> None:
        """Make the folder, or take the existing one where the configuration allows it.

        Raises:
            RunFolderError: it exists and may not be overwritten, or cannot be made.
        """
        try:
            if self.path.exists():
                self._check_existing(config)
            if config.run.overwrite and self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / _CONFIG).exists():
                self.write_config(config)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as failure:
            raise RunFolderError(
                f"{self.path}: cannot be written ({failure.strerror or failure}); "
                "set run.dir to a folder with space that you may write to"
            ) from None

    def _check_existing(self, config: Config) -> None:
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; choose another run.name")
        if not config.run.overwrite and config.checkpoint.resume == "never":
            raise RunFolderError(
                f"{self.path} exists; write run.overwrite=true to replace it, "
                "checkpoint.resume=auto to continue it, or another run.name"
            )
        if any(self.path.iterdir()) and not (self.path / _CONFIG).is_file():
            raise RunFolderError(
                f"{self.path} holds no {_CONFIG}, so it is not a run folder and is left alone; "
                "choose another run.name"
            )

    def write_config(self, config: Config) -> None:
        """Write the resolved configuration."""
        write_whole(self.path / _CONFIG, to_yaml(config))

    def log(self, line: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl` and its numbers to TensorBoard.

        `line` holds `kind`, `step` and numbers; lines of kind `evaluation` hold `part`.

        Raises:
            TrainingStoppedError: it cannot be written.
        """
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(to_json(line) + "\n")
            if self._board is None:
                # Events of steps that are done again replace the old ones.
                self._board = SummaryWriter(str(self.path / "tensorboard"), purge_step=line["step"])
            group = line.get("part", line["kind"])
            for name, value in line.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{group}/{name}", value, line["step"])
        except OSError as failure:
            raise TrainingStoppedError(
                f"{self.path}: metrics cannot be written ({failure.strerror or failure}); free "
                "some space and continue with checkpoint.resume=auto"
            ) from None

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines of `metrics.jsonl`."""
        if not self.metrics.exists():
            return []
        text = self.metrics.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def cut_after(self, step: int) -> None:
        """Drop the lines of steps that a resumed run will do again."""
        kept = [to_json(line) + "\n" for line in self.lines() if line["step"] <= step]
        write_whole(self.metrics, "".join(kept))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`."""
        write_whole(self.path / "summary.json", to_json(summary, indent=2) + "\n")

    def close(self) -> None:
        """Finish the TensorBoard events."""
        if self._board is not None:
            self._board.close()


def to_json(values: Any, indent: int | None = None) -> str:
    """Strict JSON; null for numbers that are not finite."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, float) and not math.isfinite(values):
        return None
    return values


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is never seen half-written."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
