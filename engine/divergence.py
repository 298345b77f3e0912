"""Training that diverges: when a loss has, and the way back to a checkpoint."""

from __future__ import annotations

import math
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor
from tqdm.auto import tqdm

from stampede.data import Dataset
from stampede.engine.checkpoint import Checkpoints, Progress, load, newest_whole, read_manifest
from stampede.engine.checkpoint.verifying import delete_after
from stampede.engine.config import Config
from stampede.engine.config.divergence import DivergenceSection
from stampede.engine.errors import (
    AFTER_ROLLBACKS,
    DivergedError,
    LossLeapError,
    TrainingStoppedError,
)
from stampede.engine.job import Job
from stampede.engine.processes import PATIENCE, Processes
from stampede.engine.row_counts import forget_row_counts
from stampede.engine.run_folder import RunFolder
from stampede.optim import NonFiniteGradientError

# Batches in a row that are left out for their loss: it is no longer the batches' fault.
_MOST_SKIPPED = 10


def count_if_skipped(loss: Tensor, progress: Progress, job: Job) -> bool:
    """Count the batch of the newest step where it was left out; whether it was.

    Args:
        loss: of the step; a job that skips no batches does not wait for it.

    Raises:
        DivergedError: so were too many before it.
    """
    if not job.skips_nonfinite or math.isfinite(loss):
        progress.skipped_in_a_row = 0
        return False
    progress.skipped_batches += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row >= _MOST_SKIPPED:
        raise DivergedError(
            f"the losses of {_MOST_SKIPPED} steps in a row, up to step {progress.step}, are not "
            "finite; the weights are as before the first of them",
            progress.step,
        )
    return True


def check_logged_loss(loss: float, progress: Progress, settings: DivergenceSection) -> None:
    """Compare a loss that was logged with those logged before it, and note it.

    Args:
        loss: of the newest step, read from the device already.

    Raises:
        LossLeapError: it is too high.
    """
    check_loss(loss, progress, settings)
    if settings.loss_factor and math.isfinite(loss):
        progress.logged_losses = [*progress.logged_losses, loss][-settings.window :]


def check_loss(loss: Tensor | float, progress: Progress, settings: DivergenceSection) -> None:
    """Compare a loss with those logged before it.

    All ranks have the same losses, so they decide alike.

    Args:
        loss: of the newest step; only where losses are compared is it waited for.

    Raises:
        LossLeapError: it is too high.
    """
    # One that is not finite is found by the step itself.
    if not settings.loss_factor or not math.isfinite(loss):
        return
    before = progress.logged_losses[-settings.window :]
    if len(before) == settings.window:
        usual = statistics.median(before)
        # Batches without any weight have a loss of 0, which no other can be compared with.
        if usual and loss > settings.loss_factor * usual:
            raise LossLeapError(
                f"the loss {loss:.4g} of step {progress.step} is more than {settings.loss_factor:g}"
                f" times {usual:.4g}, the median of the {settings.window} losses logged before it "
                "(train.on_divergence.loss_factor)",
                progress.step,
            )


@dataclass
class Rollbacks:
    """Takes a run that has diverged back to a whole checkpoint, so often and no more.

    It is the newest one, but for two whose next steps are known: that which a loss that leapt was
    that of, and that which the run was taken back to when it diverged in the same step before, or
    in a later one. Then it is one before, where there is one.

    Attributes:
        config, job, dataset, processes: what is trained, and by whom.
        folder: of the run.
        checkpoints: writes them.
        since: step that the run was begun or continued after; an older checkpoint may be one of
            before a change.
    """

    config: Config
    job: Job
    dataset: Dataset
    processes: Processes
    folder: RunFolder
    checkpoints: Checkpoints
    since: int
    _last: tuple[int, int] | None = field(default=None, init=False)

    def back(self, failure: DivergedError, progress: Progress) -> Progress:
        """Put a whole checkpoint into the job, and cut what was logged since.

        All ranks must call it. What comes after is as in a run that is resumed from there, but for
        a lower rate of the dense layers: the same batches in the same order.

        Args:
            failure: what has happened.
            progress: how far the run had come.

        Returns:
            How far it has come now; to be saved, so that a run that goes on from a checkpoint
            knows of the rollback.

        Raises:
            DivergedError: there were as many as are allowed, or there is no checkpoint.
            RunFolderError: all checkpoints are damaged.
        """
        settings = self.config.train.on_divergence
        if progress.rollbacks >= settings.rollbacks:
            if not progress.rollbacks:
                raise failure
            times = "once" if progress.rollbacks == 1 else f"{progress.rollbacks} times"
            raise DivergedError(
                f"{failure.reason}; the run had been rolled back {times} before",
                failure.step,
                AFTER_ROLLBACKS,
            )
        with self.processes.pulse.slowly("rolling back"):
            self._let_saves_end()
            self.processes.on_main(lambda: self._leave_out(failure), patience=PATIENCE)
            path = newest_whole(self.folder.checkpoints, self.processes)
            if path is None or read_manifest(path).progress.step < self.since:
                raise failure
            found = self._load(path)
        self._last = found.step, failure.step
        found.rollbacks = progress.rollbacks + 1
        found.dense_fraction = progress.dense_fraction * settings.dense_lr_factor
        self.processes.on_main(lambda: self._note(failure, path, found))
        found.metrics_lines = self.folder.metrics_lines
        return found

    def _leave_out(self, failure: DivergedError) -> None:
        """Delete checkpoints that the run would diverge from again, where one before is whole."""
        newest = []
        if self._last is not None and failure.step <= self._last[1]:
            newest.append(self._last[0] - 1)
        if isinstance(failure, LossLeapError):
            newest.append(failure.step - 2)
        for step in sorted(newest):
            if delete_after(self.folder.checkpoints, step, self.since):
                return

    def _let_saves_end(self) -> None:
        """Nothing may be written where checkpoints are tidied up."""
        try:
            self.checkpoints.wait()
        except TrainingStoppedError as lost:
            if self.processes.is_main:
                tqdm.write(f"{lost}")

    def _load(self, path: Path) -> Progress:
        if self.job.table_update is not None:
            # Steps that are queued on a GPU may have more of the same to say.
            with suppress(NonFiniteGradientError):
                self.job.table_update.check_queued(up_to_now=True)
        progress = load(path, self.job, self.dataset)
        forget_row_counts(self.job)
        return progress

    def _note(self, failure: DivergedError, path: Path, progress: Progress) -> None:
        allowed = self.config.train.on_divergence.rollbacks
        tqdm.write(
            f"{failure.reason}\n  rolled back to {path}, after step {progress.step:,} (rollback "
            f"{progress.rollbacks} of {allowed}); the dense layers go on with "
            f"{progress.dense_fraction:.3g} of their scheduled rate"
        )
        for lost in self.folder.keep_lines(progress.metrics_lines):
            tqdm.write(lost)
        self.folder.log(
            {
                "kind": "rollback",
                "step": progress.step,
                "diverged_step": failure.step,
                "reason": failure.reason,
                "rollbacks": progress.rollbacks,
                "dense_fraction": progress.dense_fraction,
            }
        )
