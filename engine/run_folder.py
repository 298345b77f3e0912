"""The folder of a run: configuration, metrics, summary, curve, checkpoints."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from stampede.data.prepared.whole_folder import sync_folder
from stampede.engine.appending import append_whole
from stampede.engine.config import Config, to_yaml
from stampede.engine.curve import draw_curve
from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.event_log import EventLog
from stampede.engine.restarts import launched_by

# Folder of a sweep that holds its run folders.
TRIALS = "trials"


class RunFolder:
    """Files of one run; only rank 0 writes, and opens it.

    Args:
        path: the folder, kept by `reserve` and made by `claim`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._events = EventLog(path / "tensorboard")
        self._lock: TextIO | None = None
        self._continued = False
        self._lines = 0

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Let other runs have the folder."""
        self._events.close()
        if self._lock is not None:
            self._lock.close()

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Every logged line, as JSON."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The result, once the run has ended."""
        return self.path / "summary.json"

    @property
    def curve(self) -> Path:
        """Picture of the learning curve."""
        return self.path / "curve.png"

    def reserve(self, config: Config) -> bool:
        """Keep other runs out of the folder until the context ends, and check that it is free.

        Nothing in the folder is changed.

        Returns:
            Whether the run in it is to be continued from its newest checkpoint, if it has one: as
            the configuration says, or since torchrun has restarted the processes that made it.

        Raises:
            RunFolderError: another run writes it, it exists and may not be used, or its parent
                cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Beside the folder, so that overwriting does not delete it; the kernel frees the lock
            # when the process dies in whatever way.
            self._lock = self.path.with_name(f".{self.path.name}.lock").open("a+")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            raise RunFolderError(
                f"{self.path} is being written by another run (process "
                f"{self._lock.read().strip()}); end it first, or choose another run.name"
            ) from None
        except OSError as failure:
            raise RunFolderError(_cannot_write(self.path, failure)) from None
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        restarted = launched_by() is not None and self._launched_by() == launched_by()
        self._continued = restarted or config.checkpoint.resume == "auto"
        if self.path.exists():
            self._check_existing(config)
        return self._continued

    def claim(self, config: Config) -> None:
        """Make the folder, instead of the existing one where the configuration says so.

        Raises:
            RunFolderError: it cannot be made.
        """
        try:
            if config.run.overwrite and not self._continued and self.path.exists():
                # Under another name first: a kill must not leave half a run behind.
                deleted = self.path.with_name(f".{self.path.name}.deleted")
                shutil.rmtree(deleted, ignore_errors=True)
                os.replace(self.path, deleted)
                shutil.rmtree(deleted)
            self.path.mkdir(exist_ok=True)
            # Before anything else is in it, so that a restart knows the folder as its own.
            if launched_by() is not None:
                write_whole(self._launch_file, launched_by())
            # Also where an earlier try with other settings got to no checkpoint.
            self.write_config(config)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as failure:
            raise RunFolderError(_cannot_write(self.path, failure)) from None

    def _check_existing(self, config: Config) -> None:
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; choose another run.name")
        for folder in (self.path, self.checkpoints):
            if folder.exists() and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
                denied = OSError(errno.EACCES, os.strerror(errno.EACCES))
                raise RunFolderError(_cannot_write(folder, denied))
        if not config.run.overwrite and not self._continued:
            raise RunFolderError(
                f"{self.path} exists; write run.overwrite=true to replace it, "
                "checkpoint.resume=auto to continue it, or another run.name"
            )
        # A kill may have left an unfinished file, whose name begins with a dot.
        content = [path for path in self.path.iterdir() if not path.name.startswith(".")]
        if content and not self.config_file.is_file():
            raise RunFolderError(
                f"{self.path} holds no {self.config_file.name}, so it is not a run folder and is "
                "left alone; choose another run.name"
            )

    @property
    def _launch_file(self) -> Path:
        """Says which torchrun started the run."""
        return self.path / ".torchrun"

    def _launched_by(self) -> str | None:
        try:
            return self._launch_file.read_text(encoding="utf-8")
        except OSError:
            return None

    def write_config(self, config: Config) -> None:
        """Write the resolved configuration."""
        with self._writing():
            write_whole(self.config_file, to_yaml(config))

    def log(self, line: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl` and its numbers to TensorBoard.

        `line` holds `kind`, `step` and numbers, also in sections; one of kind `evaluation` holds
        `part`.

        Raises:
            TrainingStoppedError: it cannot be written.
        """
        with self._writing():
            append_whole(self.metrics, f"{to_json(line)}\n".encode())
            self._lines += 1
            self._events.add(line)

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines of `metrics.jsonl`."""
        if not self.metrics.exists():
            return []
        text = self.metrics.read_text(encoding="utf-8")
        return [json.loads(line) for line in _whole_lines(text)]

    @property
    def metrics_lines(self) -> int:
        """Lines of `metrics.jsonl` that this process has kept or written."""
        return self._lines

    def keep_lines(self, count: int) -> None:
        """Drop all but the first lines: those of steps that a resumed run will do again."""
        # Beyond them there may be anything after a power loss.
        text = self.metrics.read_bytes().decode(errors="replace") if self.metrics.exists() else ""
        kept = _whole_lines(text)[:count]
        with self._writing():
            # What it is told next replaces events of steps that are done again.
            self._events.close()
            write_whole(self.metrics, "".join(kept))
        self._lines = len(kept)

    def sync(self) -> None:
        """Have the lines on the disk, also after a power loss: a checkpoint counts on them.

        Raises:
            TrainingStoppedError: they cannot be written.
        """
        if self._lines:
            with self._writing(), self.metrics.open("rb") as file:
                os.fsync(file.fileno())
                # The file may have come in the place of an older one.
                sync_folder(self.path)

    def write_report(self, name: str, values: dict[str, Any]) -> None:
        """Write a file of JSON."""
        with self._writing():
            write_whole(self.path / name, to_json(values, indent=1) + "\n")

    def write_results(self, summary: dict[str, Any], title: str) -> None:
        """Write `summary.json` and `curve.png`."""
        with self._writing():
            write_whole(self.summary, to_json(summary, indent=2) + "\n")
            write_whole(self.curve, draw_curve(self.lines(), title))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as failure:
            denied = failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            remedy = "make the folder writable" if denied else "make room"
            raise TrainingStoppedError(
                f"{self.path}: results cannot be written ({failure.strerror or failure}); {remedy} "
                "and continue with checkpoint.resume=auto"
            ) from None


def _whole_lines(text: str) -> list[str]:
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _cannot_write(path: Path, failure: OSError) -> str:
    return (
        f"{path}: cannot be written ({failure.strerror or failure}); set run.dir to a folder with "
        "space that you may write to"
    )


def to_json(values: Any, indent: int | None = None) -> str:
    """Strict JSON; null for numbers that are not finite."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_finite(value) for value in values]
    if isinstance(values, float) and not math.isfinite(values):
        return None
    return values


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8, so that it is never seen half-written."""
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
