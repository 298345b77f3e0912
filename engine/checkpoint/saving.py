"""Writes a run's checkpoints while training continues."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from tqdm.auto import tqdm

from stampede.data import Dataset
from stampede.engine.checkpoint.hosts import gather_files
from stampede.engine.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TableEntry,
    as_text,
    data_entry,
    versions,
)
from stampede.engine.checkpoint.retention import name_of, prune
from stampede.engine.checkpoint.tensors import bytes_on_cpu, on_cpu, reason, write_tensors
from stampede.engine.config import Config
from stampede.engine.console import readable_bytes
from stampede.engine.errors import DivergedError, NotPublishedError, TrainingStoppedError
from stampede.engine.exit_status import is_lost_connection
from stampede.engine.job import Job
from stampede.engine.memory import free_memory
from stampede.engine.processes import Processes, together
from stampede.engine.training.progress import Progress
from stampede.files import (
    check_files,
    file_entry,
    hidden,
    publish_folder,
    remove,
    sync,
    write_file,
)
from stampede.models import table_name

_NO_MEMORY = "no memory for a copy; checkpoint.asynchronous=false needs none on a CPU: "


_REMEDY = "; earlier ones are untouched. Make room and continue with checkpoint.resume=auto"


class Checkpoints:
    """Writes checkpoints of a job; a checkpoint appears whole or not at all.

    With `checkpoint.asynchronous` training continues while a thread writes. A save then copies this
    rank's tables, moments and dense layers to CPU memory, which doubles their memory until all is
    written. Otherwise, and where the copy would not fit, only tensors on a GPU are copied, and
    training waits.

    All ranks must make one and call its methods at the same points; the thread has its own process
    group. On exit the context waits for the last write. Rank 0 calls `publish` after each.

    With `apart` each host has a folder of its own, and rank 0's gets the files of all.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        config: Config,
        dataset: Dataset,
        processes: Processes,
        publish: Callable[[], None] = lambda: None,
        apart: bool = False,
    ) -> None:
        self._folder, self._apart = folder, apart
        self._makes_folder = processes.is_first_of_host if apart else processes.is_main
        self._job = job
        self._settings = config.checkpoint
        self._processes, self._publish = processes, publish
        self._group = processes.checkpoint_group
        self._target = folder
        self._thread: Thread | None = None
        self._failure: str | None = None
        self._remedy, self._told_to_wait = _REMEDY, False
        # Buffers may hold infinities on purpose, such as masks.
        self._finite_buffers = [
            name for name, buffer in job.dense_buffers.items() if buffer.isfinite().all()
        ]
        self._described = {
            "versions": versions(),
            "config": config.model_dump(mode="json"),
            "tables": {
                table_name(table): TableEntry(
                    field=table,
                    rows=rows,
                    columns={n: [*ends] for n, ends in job.front.columns_of(table).names.items()},
                )
                for table, rows in dataset.tables.items()
            },
            "data": data_entry(dataset),
            "world_size": processes.world_size,
        }

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        heartbeat = self._processes.heartbeat
        stage = heartbeat.stage
        try:
            with heartbeat.slowly("saving"):
                self.wait()
        except TrainingStoppedError:
            # It must not hide the exception that ended the context.
            if kind is None:
                raise
        if kind is not None:
            # The report of the failure names the stage.
            heartbeat.stage = stage

    def save(self, progress: Progress) -> None:
        """Begin a checkpoint of the job's current state, once the previous one is written.

        If the previous one failed, rank 0 says so and this one is written synchronously, since the
        cause may be gone.

        Raises:
            TrainingStoppedError: it failed, and so did the previous one, or
                `checkpoint.asynchronous` is off.
            DivergedError: the dense layers are not finite.
        """
        before = self._finish()
        if before is not None and self._processes.is_main:
            tqdm.write(f"{before}; training continues, and the current state is written now")

        def check_finite() -> None:
            # No run could continue from layers that are not finite.
            buffers = self._job.dense_buffers
            kept = {name: buffers[name] for name in self._finite_buffers}
            for name, values in {**self._job.dense_parameters, **kept}.items():
                if not values.isfinite().all():
                    raise DivergedError(
                        f"the dense layers are not finite after step {progress.step:,} ({name} is "
                        "not); nothing was saved, earlier checkpoints are untouched",
                        progress.step,
                    )

        together(check_finite, self._group)
        state, failure = self._job.state(self._processes.rank), None
        asynchronous = self._settings.asynchronous and self._has_room(state)
        try:
            state = on_cpu(state, copy=asynchronous)
        except (MemoryError, RuntimeError) as lack:
            # Raised later, on all ranks.
            state, failure = {}, f"{_NO_MEMORY}{reason(lack)} on rank {self._processes.rank}"
        self._target = self._folder / name_of(progress)
        arguments = (state, failure, deepcopy(progress))
        if asynchronous:
            self._thread = Thread(target=self._try_to_write, args=arguments, daemon=True)
            self._thread.start()
        else:
            self._try_to_write(*arguments)
        if before is not None or not self._settings.asynchronous:
            self.wait()

    def _has_room(self, state: Any) -> bool:
        """Whether copies of all ranks fit into memory; if not, that is said once."""
        # Linux does not refuse memory that it lacks: it kills the process.
        copy = bytes_on_cpu(state) * self._processes.local_world_size
        if all(together(lambda: copy < free_memory(), self._group)):
            return True
        if self._processes.is_main and not self._told_to_wait:
            tqdm.write(
                f"training waits while checkpoints are written: a copy of {readable_bytes(copy)} "
                "would not fit into memory"
            )
            self._told_to_wait = True
        return False

    def wait(self) -> None:
        """Wait for the last write; raises a `TrainingStoppedError` if it failed."""
        failure = self._finish()
        if failure is not None:
            raise TrainingStoppedError(f"{failure}{self._remedy}")

    def _finish(self) -> str | None:
        """Wait for the last write; returns why it failed, only once.

        Raises:
            RuntimeError: a rank is gone, which no space on the disk would mend.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is None:
            return None
        if is_lost_connection(failure):
            raise RuntimeError(failure)
        if self._remedy == NotPublishedError.REMEDY:
            return failure
        there = next(path for path in (self._folder, *self._folder.parents) if path.exists())
        free = readable_bytes(shutil.disk_usage(there).free)
        return (
            f"{self._target}: the checkpoint cannot be written, {free} are free there ({failure})"
        )

    def _try_to_write(self, state: dict[str, Any], failure: str | None, progress: Progress) -> None:
        try:
            self._write(state, failure, progress)
        except NotPublishedError as found:
            self._failure, self._remedy = found.args[0], found.REMEDY
        # torch's CheckpointException is not an Exception.
        except (Exception, CheckpointException) as found:
            self._failure, self._remedy = reason(found), _REMEDY
            if self._makes_folder:
                remove(hidden(self._target, "tmp"))

    def _write(self, state: dict[str, Any], failure: str | None, progress: Progress) -> None:
        """Write on all ranks; they fail together."""
        folder, here = hidden(self._target, "tmp"), self._processes

        def prepare() -> None:
            if failure is not None:
                raise RuntimeError(failure)
            if self._makes_folder:
                remove(folder)
                folder.mkdir(parents=self._apart)

        together(prepare, self._group)
        tensors, names = write_tensors(state, folder, self._group)
        entries = together(lambda: [file_entry(folder / n, folder) for n in names], self._group)
        if self._apart:
            gather_files(folder, entries, here)
            if self._makes_folder and not here.is_main:
                remove(folder)

        def finish() -> None:
            if here.is_main:
                files = list(chain(*entries))
                check_files(folder, files, content=False)
                manifest = Manifest(
                    progress=progress,
                    files=files,
                    tensors=tensors,
                    **self._described,
                )
                write_file(folder / MANIFEST, as_text(manifest))
                sync(folder / MANIFEST)
                publish_folder(folder, self._target)
                prune(self._folder, self._settings, progress.best_epoch)
                self._publish()

        together(finish, self._group)
