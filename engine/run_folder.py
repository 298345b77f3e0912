"""The folder of a run: configuration, metrics, summary, curve, checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from stampede.engine.config import Config, to_yaml
from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.event_log import EventLog
from stampede.engine.figures import draw_curve
from stampede.engine.metrics_log import MetricsLog
from stampede.engine.restarts import launched_by
from stampede.files import delete_folder, to_json, write_file

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
        self._lock: BinaryIO | None = None
        self._holds_lock = self._made_parent = False
        self._continued = False
        self._lines = MetricsLog(path / "metrics.jsonl")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Let other runs have the folder."""
        self._events.close()
        if self._lock is not None:
            # On a folder that can no longer be written the file stays, and locks nothing.
            with suppress(OSError):
                if self._holds_lock:
                    self._lock_file.unlink()
                if self._made_parent:
                    self.path.parent.rmdir()
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
        return self._lines.path

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
            self._made_parent = not self.path.parent.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._hold_lock()
        except BlockingIOError:
            self._lock.seek(0)
            process = self._lock.read().decode(errors="replace").strip() or "unknown"
            raise RunFolderError(
                f"{self.path} is being written by another run (process {process}); end it first, "
                "or choose another run.name"
            ) from None
        except OSError as failure:
            raise RunFolderError(_cannot_write(self.path, failure)) from None
        # On a full disk it locks without its number.
        with suppress(OSError):
            self._lock.truncate(0)
            self._lock.write(f"{os.getpid()}\n".encode())
        restarted = launched_by() is not None and self._launched_by() == launched_by()
        self._continued = restarted or config.checkpoint.resume == "auto"
        if self.path.exists():
            self._check_existing(config)
        return self._continued

    @property
    def _lock_file(self) -> Path:
        """Beside the folder, so that overwriting does not delete it."""
        return self.path.with_name(f".{self.path.name}.lock")

    def _hold_lock(self) -> None:
        """The kernel frees the lock when the process dies in whatever way.

        Raises:
            BlockingIOError: another process holds it.
        """
        while not self._holds_lock:
            self._lock = self._lock_file.open("a+b", buffering=0)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A run that has just ended may have deleted the file between the two lines.
            with suppress(FileNotFoundError):
                here = os.stat(self._lock_file)
                self._holds_lock = os.path.samestat(os.fstat(self._lock.fileno()), here)
            if not self._holds_lock:
                self._lock.close()

    def claim(self, config: Config) -> None:
        """Make the folder, instead of the existing one where the configuration says so.

        Raises:
            RunFolderError: it cannot be made.
        """
        try:
            if config.run.overwrite and not self._continued and self.path.exists():
                delete_folder(self.path)
            self.path.mkdir(exist_ok=True)
            # Before anything else is in it, so that a restart knows the folder as its own.
            if launched_by() is not None:
                write_file(self._launch_file, launched_by())
            # Also where an earlier try with other settings got to no checkpoint.
            self.write_config(config)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as failure:
            raise RunFolderError(_cannot_write(self.path, failure)) from None

    def _check_existing(self, config: Config) -> None:
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; choose another run.name")
        for folder in (self.checkpoints, self.path / "logs", self.path / "tensorboard"):
            if folder.exists() and not folder.is_dir():
                raise RunFolderError(_other_kind(folder, "file", "a folder"))
        for file in (self.config_file, self.metrics, self.summary, self.curve):
            if file.is_dir():
                raise RunFolderError(_other_kind(file, "folder", "a file"))
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

    def begin_anew(self) -> str:
        """What is told where a run that was to be continued has no checkpoint.

        Returns:
            A sentence; empty where nothing is lost.

        Raises:
            RunFolderError: the run had ended, so that its results would be lost.
        """
        if self.summary.exists():
            raise RunFolderError(
                f"{self.path} has the results of a run that has ended, and no checkpoint to "
                "continue it from; write run.overwrite=true instead of checkpoint.resume=auto to "
                "train anew, or choose another run.name"
            )
        with self._writing():
            lost = self._lines.stored()
        if not lost:
            return ""
        return (
            f"no checkpoint in {self.checkpoints}: the run begins anew; {lost:,} lines of "
            f"{self.metrics.name} are dropped"
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
            write_file(self.config_file, to_yaml(config))

    def log(self, line: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl` and its numbers to TensorBoard.

        `line` holds `kind`, `step` and numbers, also in sections; one of kind `evaluation` holds
        `part`.

        Raises:
            TrainingStoppedError: it cannot be written.
        """
        with self._writing():
            self._lines.append(line)
            self._events.add(line)

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines of `metrics.jsonl`, see `MetricsLog.read`."""
        return self._lines.read()

    @property
    def metrics_lines(self) -> int:
        """Lines of `metrics.jsonl` that this process has kept or written."""
        return self._lines.count

    def keep_lines(self, count: int) -> list[str]:
        """Drop lines of steps that a resumed run will do again, see `MetricsLog.keep`.

        Raises:
            TrainingStoppedError: they cannot be read or written.
        """
        with self._writing():
            # What it is told next replaces events of steps that are done again.
            self._events.close()
            return self._lines.keep(count)

    def sync(self) -> None:
        """Have the lines on the disk, also after a power loss: a checkpoint counts on them.

        Raises:
            TrainingStoppedError: they cannot be written.
        """
        with self._writing():
            self._lines.sync()

    def write_report(self, name: str, values: dict[str, Any]) -> None:
        """Write a file of JSON."""
        with self._writing():
            write_file(self.path / name, to_json(values, indent=1) + "\n")

    def write_results(self, summary: dict[str, Any], title: str) -> None:
        """Write `summary.json` and `curve.png`."""
        with self._writing():
            write_file(self.summary, to_json(summary, indent=2) + "\n")
            write_file(self.curve, draw_curve(self.lines(), title))

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


def _other_kind(path: Path, found: str, kept: str) -> str:
    return (
        f"{path} is a {found}, where a run keeps {kept}; move it away, or choose another run.name"
    )


def _cannot_write(path: Path, failure: OSError) -> str:
    return (
        f"{path}: cannot be written ({failure.strerror or failure}); set run.dir to a folder with "
        "space that you may write to"
    )
