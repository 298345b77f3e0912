"""The folder of a run: configuration, metrics, summary, curve, checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from uuid import uuid4

from tqdm.auto import tqdm

from stampede import stores
from stampede.engine.config import Config, to_yaml
from stampede.engine.errors import NotPublishedError, RunFolderError, TrainingStoppedError
from stampede.engine.results.plots import draw_curve
from stampede.engine.results.tensorboard import Events
from stampede.engine.start_up import launched_by
from stampede.files import (
    MOST_MANIFEST,
    append,
    delete_folder,
    hidden,
    open_inside,
    parse_json,
    read_file,
    read_json,
    refuse_links,
    remove,
    sync,
    to_json,
    write_file,
)
from stampede.lease import Lease
from stampede.settings import reason_of

# torch takes seconds to import, and reading a run's results needs none.
if TYPE_CHECKING:
    from stampede.engine.processes import Processes

# File of a run folder of `stampede incremental`, which holds a run folder for each period.
PERIODS = "periods.json"

# Keys of every line of `metrics.jsonl`, of the lines of some kinds, and of `summary.json`: files
# may have been edited.
_OF_LINE = {"kind", "step"}
_OF_KIND = {
    "evaluation": {"part", "auc", "train_seconds"},
    "stopped": {"reason"},
    "timing": {"step_seconds", "phase_seconds", "slowest_seconds"},
    "train": {"loss"},
}
_OF_SUMMARY = {"auc", "last", "best_epoch", "selected_on", "train_seconds", "steps", "epochs"}

_INSTEAD = (
    "write run.overwrite=true to replace it, checkpoint.resume=auto to continue it, or another "
    "run.name"
)


def period_folder(number: int) -> str:
    """Name of the run folder of a period."""
    return f"period_{number:04d}"


class RunFolder:
    """The files of one run; only rank 0 opens and writes them, after `reserve` and `claim`.

    Args:
        path: the folder, or its URL, which gets a copy after each checkpoint and at the end.
    """

    def __init__(self, path: str | Path) -> None:
        self.url = str(path) if stores.is_url(path) else ""
        self._lease: Lease | None = None
        # Whether the folder has what the URL holds, so that it may be copied there.
        self._is_taken_up = False
        self._lie_in(stores.working(self.url) if self.url else stores.local(path))
        self.metrics_lines = 0
        self._lock: BinaryIO | None = None
        self._made_parent = self._continued = False
        # Whether the run is in a store, and hosts share no folder.
        self.apart = False

    def _lie_in(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.config_file = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.curve = path / "curve.png"
        # Names the torchrun that started the run.
        self._launch_file = path / ".torchrun"
        # Beside the folder, so that `run.overwrite` leaves it.
        self._lock_file = path.with_name(f".{path.name}.lock")
        self._events = Events(path / "tensorboard")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the folder."""
        self._events.close()
        if self._lease is not None:
            try:
                self.publish()
            except NotPublishedError:
                # It must not hide the exception that ended the context.
                if kind is None:
                    raise
            finally:
                self._lease.release()
        if self._lock is not None:
            # If the folder is no longer writable, the file stays; it locks nothing.
            with suppress(OSError):
                self._lock_file.unlink()
                if self._made_parent:
                    self.path.parent.rmdir()
            self._lock.close()

    def reserve(self, config: Config) -> bool:
        """Lock the folder until the context ends, and check that it is free; changes nothing in it.

        Returns:
            Whether to continue the run in it, if it has a checkpoint: the configuration says so, or
            torchrun has restarted the processes of that run.

        Raises:
            RunFolderError: another run uses it, it exists and may not be overwritten, or its
                parent is not writable.
        """
        try:
            self._made_parent = not self.path.parent.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = open_inside(self.path.parent, self._lock_file.name)
            # The kernel frees the lock when the process dies.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with lock:
                lock.seek(0)
                process = lock.read().decode().strip() or "unknown"
            raise RunFolderError(
                f"{self.path} is being written by another run (process {process}); end it first, "
                "or choose another run.name"
            ) from None
        except OSError as failure:
            raise RunFolderError(_cannot_write(self.path, failure)) from None
        self._lock = lock
        # On a full disk the lock works without the number.
        with suppress(OSError):
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n".encode())
        if self.url:
            self._lease = Lease(self.url)
        launched = launched_by()
        self._continued = config.checkpoint.resume == "auto"
        if launched is not None and self._launch_file.is_file():
            self._continued |= launched.encode() == read_file(self._launch_file)
        if self.url:
            self._take_up(config.run.overwrite)
        if not self.path.exists():
            return self._continued
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; choose another run.name")
        if not config.run.overwrite and not self._continued:
            raise RunFolderError(f"{self.path} exists; {_INSTEAD}")
        # A killed run may have left an unfinished file; its name begins with a dot.
        content = [path for path in self.path.iterdir() if not path.name.startswith(".")]
        if content and not self.config_file.is_file():
            raise RunFolderError(f"{self.path} {self._no_run()}")
        if self._continued:
            try:
                refuse_links(self.path, *os.listdir(self.path))
            except OSError as failure:
                raise RunFolderError(f"{failure.filename}: {failure.strerror}") from None
        return self._continued

    def _take_up(self, overwrite: bool) -> None:
        """Bring the folder to what the URL holds, or begin anew."""
        if self._continued:
            stores.taken_up(self.url, self.path)
        elif stores.exists(self.url):
            if not overwrite:
                raise RunFolderError(f"{self.url} exists; {_INSTEAD}")
            if not stores.exists(f"{self.url}/{self.config_file.name}"):
                raise RunFolderError(f"{self.url} {self._no_run()}")
            stores.forgotten(self.url, self.path)
        self._is_taken_up = True

    def _no_run(self) -> str:
        return (
            f"holds no {self.config_file.name}, so it is not a run folder and is left alone; "
            "choose another run.name"
        )

    def check_shared(self, processes: Processes, must_share: bool = False) -> None:
        """Check that all hosts see the same folder, after `reserve`; all ranks must call it.

        Of a run in a store they need not, unless they `must_share`: then they are `apart`, and all
        but the host of rank 0 work in `.NAME.host_1` and so on, also those that see its folder.

        Raises:
            RunFolderError: a host has a folder of its own there, so no checkpoint would be whole.
        """
        if processes.world_size == processes.local_world_size:
            return
        from stampede.engine.processes import together

        def make() -> None:
            try:
                mark.touch()
            except OSError as failure:
                raise RunFolderError(_cannot_write(self.path, failure)) from None

        def look() -> None:
            if not mark.exists() and (must_share or not self.url):
                raise RunFolderError(
                    f"{self.path.parent.absolute()} is not the folder that {processes.hosts[0]}, "
                    "the host of rank 0, has there, and a checkpoint would be in pieces; mount one "
                    "folder on all hosts at the same place, such as by NFS, and write it as "
                    + ("$STAMPEDE_STORES" if self.url else "run.dir")
                    + ("" if must_share else ", or write the URL of a store")
                )

        # A new name, which no host's network file system remembers as absent.
        mark = hidden(self.path, processes.on_main(lambda: uuid4().hex))
        processes.on_main(make)
        try:
            processes.on_each_machine(look)
            self.apart = not all(together(mark.exists, processes.group))
        finally:
            if processes.is_main:
                mark.unlink()
        if self.apart and processes.host_number:
            # Its own folder of that name may have results of when it was the host of rank 0; one
            # that it shares gets the files of all.
            self._lie_in(hidden(self.path, f"host_{processes.host_number}"))
            if processes.is_first_of_host:
                # Left by a run that was killed.
                remove(self.checkpoints)
                self.path.mkdir(parents=True, exist_ok=True)

    def claim(self, config: Config) -> None:
        """Make the folder, or replace it if the configuration says so; else a `RunFolderError`."""
        try:
            if config.run.overwrite and not self._continued and self.path.exists():
                delete_folder(self.path)
            self.path.mkdir(exist_ok=True)
            # First of all, so that a restart recognises the folder as its own.
            if launched_by() is not None:
                write_file(self._launch_file, launched_by())
            # An earlier attempt with other settings may have ended before its first checkpoint.
            self.write_config(config)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as failure:
            raise RunFolderError(_cannot_write(self.path, failure)) from None

    def begin_anew(self) -> str:
        """Let a run that was to be continued, but has no checkpoint, start from scratch.

        Returns a sentence on what is lost, or an empty one.
        """
        if self.summary.exists():
            raise RunFolderError(
                f"{self.path} has the results of a run that has ended, and no checkpoint to "
                "continue it from; write run.overwrite=true instead of checkpoint.resume=auto to "
                "train from scratch, or choose another run.name"
            )
        with self.writing():
            lost = len(self._whole_lines())
        if not lost:
            return ""
        return (
            f"no checkpoint in {self.checkpoints}: the run starts from scratch; {lost:,} lines of "
            f"{self.metrics.name} are dropped"
        )

    def write_config(self, config: Config) -> None:
        """Write the resolved configuration."""
        with self.writing():
            write_file(self.config_file, to_yaml(config))

    def log(self, line: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl` and its numbers to TensorBoard.

        It has `kind`, `step` and numbers, also in sections, and `part` in an evaluation. Raises a
        `TrainingStoppedError` if it cannot be written.
        """
        with self.writing():
            append(self.path, self.metrics.name, f"{to_json(line)}\n".encode())
            self.metrics_lines += 1
            self._events.add(line)

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines of `metrics.jsonl`; an OSError or ValueError if it is damaged."""
        found = []
        for number, line in enumerate(self._whole_lines(), 1):
            try:
                values = _with_keys(parse_json(line), _OF_LINE)
                found.append(_with_keys(values, _OF_KIND.get(values["kind"], set())))
            except ValueError as mistake:
                raise ValueError(f"line {number:,}: {reason_of(mistake)}") from None
        return found

    def read_summary(self) -> dict[str, Any]:
        """The content of `summary.json`; an OSError or ValueError if it is damaged."""
        return _with_keys(read_json(self.summary), _OF_SUMMARY)

    def keep_lines(self, count: int | None = None) -> None:
        """Keep the first lines, by default all whole ones; a continued run repeats later steps."""
        with self.writing():
            # The next writer replaces the events of repeated steps.
            self._events.close()
            lines = self._whole_lines()[:count]
            write_file(self.metrics, b"".join(lines))
        if count is not None and len(lines) < count:
            tqdm.write(f"{self.metrics}: {count - len(lines):,} lines of earlier steps are missing")
        self.metrics_lines = len(lines)

    def _whole_lines(self) -> list[bytes]:
        content = read_file(self.metrics, MOST_MANIFEST) if self.metrics.exists() else b""
        return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]

    def sync(self) -> None:
        """Sync the lines to the disk: a checkpoint relies on them, also after a power loss."""
        if not self.metrics_lines:
            return
        with self.writing():
            sync(self.metrics)
            # The file may have replaced an older one.
            sync(self.path)

    def write_report(self, name: str, values: dict[str, Any]) -> None:
        """Write a file of JSON."""
        with self.writing():
            write_file(self.path / name, to_json(values, indent=1) + "\n")

    def write_results(self, summary: dict[str, Any], title: str) -> None:
        """Write `summary.json` and `curve.png`."""
        with self.writing():
            write_file(self.summary, to_json(summary, indent=2) + "\n")
            try:
                write_file(self.curve, draw_curve(self.lines(), title))
            # A line that was there before the run was continued must not cost its results.
            except (ValueError, LookupError, TypeError) as failure:
                tqdm.write(f"{self.metrics}: damaged ({failure!s:.200}): no {self.curve.name}")

    def publish(self) -> None:
        """Copy what is new to the store, if `run.dir` is in one."""
        if self._lease is None or not self._is_taken_up:
            return
        try:
            self._lease.check()
            stores.published(self.url, self.path, self._lease.check)
        except OSError as failure:
            raise NotPublishedError(
                f"{self.url}: results cannot be copied there ({failure.strerror}); they are in "
                f"{self.path}"
            ) from None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an error of writing into a `TrainingStoppedError` of one sentence."""
        try:
            yield
        except OSError as failure:
            denied = failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            remedy = "make the folder writable" if denied else "make room"
            raise TrainingStoppedError(
                f"{self.path}: results cannot be written ({failure.strerror or failure}); {remedy} "
                "and continue with checkpoint.resume=auto"
            ) from None


def _with_keys(values: Any, keys: set[str]) -> dict[str, Any]:
    missing = sorted(keys - values.keys() if isinstance(values, dict) else keys)
    if missing:
        raise ValueError(f"no {missing[0]!r}")
    return values


def _cannot_write(path: Path, failure: OSError) -> str:
    return (
        f"{path}: cannot be written ({failure.strerror or failure}); set run.dir to a folder with "
        "space that you may write to"
    )
