"""The time that training takes, without what else a run does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from stampede.engine.checkpoint import Progress
from stampede.engine.job import Job
from stampede.engine.processes import Processes
from stampede.engine.step import flush_tables


class TrainingTime:
    """Adds the seconds of training to the progress; evaluations and saves do not count.

    Steps that rows have still to take when training pauses are taken then, and their time counts.

    Args:
        job, processes: whose training it is.
        progress: has the seconds.
    """

    def __init__(self, job: Job, processes: Processes, progress: Progress) -> None:
        self._job, self._processes, self._progress = job, processes, progress
        self._since: float | None = None

    def go_on(self) -> None:
        """The time from here on is that of training; nothing changes where it is already."""
        if self._since is not None:
            return
        self._since = time.perf_counter()
        self._since_rate = (self._since, self._progress.samples)

    def pause(self) -> None:
        """The time of training ends here, once all rows are up to date; or has ended before."""
        if self._since is None:
            return
        progress, processes = self._progress, self._processes
        processes.pulse.beat("updating waiting rows")
        flush_tables(self._job, progress.step, processes.device)
        progress.train_seconds += time.perf_counter() - self._since
        self._since = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it no time counts; after a failure training does not go on."""
        running = self._since is not None
        self.pause()
        yield
        if running:
            self.go_on()

    def samples_per_second(self) -> float:
        """Of the training since the last call, or since training went on."""
        since, samples = self._since_rate
        self._since_rate = now, trained = time.perf_counter(), self._progress.samples
        return (trained - samples) / (now - since)
