"""The training loop: steps, epochs, when to evaluate and when to save."""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stampede.engine.advice import on_first_epoch, tell
from stampede.engine.checkpoint.manifest import Progress
from stampede.engine.checkpoint.saving import Checkpoints
from stampede.engine.clip_watch import ClipWatch
from stampede.engine.config import DivergenceSection
from stampede.engine.console import progress_bar
from stampede.engine.errors import DivergedError, InterruptedRunError, TrainingStoppedError
from stampede.engine.evaluate import (
    Plateau,
    evaluate_run,
    finish_epoch,
    is_evaluated,
    stops_early,
)
from stampede.engine.monitor import Monitor
from stampede.engine.optimizers import learning_rates
from stampede.engine.reading import Reader
from stampede.engine.step import SentBatch, flush_tables, prefetch, train_step
from stampede.engine.stop import Agreement, StopSignals
from stampede.engine.training_run import TrainingRun, clipped_share
from stampede.optim import begin_tables_again

# After this many non-finite losses in a row, single batches are not the cause.
_MOST_SKIPPED = 10


class _StopRequestedError(Exception):
    """All ranks have agreed to stop because of a signal."""


class Trainer:
    """Trains a run to its end, from wherever its progress is."""

    def __init__(self, run: TrainingRun) -> None:
        config, progress = run.config, run.progress
        self._run, self._config, self._progress = run, config, progress
        self._reader = Reader(config, run.dataset, run.processes)
        self._batches = self._reader.training()
        if progress.reader:
            self._reader.load_state_dict(self._batches, progress.reader)
        self._clip_watch = ClipWatch(run)
        self._clock = _TrainingClock(run)
        self._signals = StopSignals()
        self._agreement = Agreement(run.processes, self._signals, config.checkpoint.every_minutes)
        self._monitor = Monitor(config, run.processes, run.folder.path, progress.step)
        self._checkpoints = Checkpoints(
            run.folder.checkpoints, run.job, config, run.dataset, run.processes
        )
        # The newest loss, if not yet compared with earlier ones.
        self._unchecked: Tensor | None = None

    def fit(self) -> None:
        """Train the remaining epochs.

        Raises:
            TrainingStoppedError: the run diverged, or a file cannot be written.
            InterruptedRunError: SIGTERM or SIGINT asked to stop; a checkpoint was written.
            RunFolderError, SettingsError, DataError: the data cannot be read as asked.
        """
        progress, epochs = self._progress, self._config.train.epochs
        total, is_main = self._run.dataset.train.rows * epochs, self._run.processes.is_main
        bar = progress_bar(total, progress.samples, is_main)
        with self._noting_a_stop(), self._signals.watched(), self._monitor, self._checkpoints, bar:
            try:
                if self._run.dataset.period and not progress.last:
                    # Once, before these rows are trained on.
                    self._clock.pause()
                    self._evaluate()
                for epoch in range(progress.epoch, epochs):
                    if stops_early(progress, self._config.evaluate):
                        break
                    self._begin_tables_again_if_due(epoch)
                    for sent in self._batches_left(epoch):
                        loss = self._step(sent, epoch)
                        bar.update(sent.batch.global_samples)
                        # Reading a loss on a GPU waits for the GPU.
                        if self._unchecked is None or not loss.is_cuda:
                            shown = {"loss": f"{loss.item():.4f}", "epoch": epoch + 1}
                            bar.set_postfix(shown, refresh=False)
                        self._evaluate_and_save_if_due(epoch)
                    self._finish_epoch(epoch)
                if not progress.last:
                    # A continued run with fewer epochs than already trained has not evaluated yet.
                    self._evaluate()
            except _StopRequestedError as stop:
                self._stop(*stop.args)

    def _begin_tables_again_if_due(self, epoch: int) -> None:
        """Reset the tables before an epoch, once."""
        run, progress, table = self._run, self._progress, self._config.optim.embedding
        if getattr(table, "begin_again", "never") == "never" or epoch <= progress.tables_epoch:
            return
        flush_tables(run.job, progress.step, run.processes.device)
        # Larger than any seed of a run.
        begin_tables_again(run.job.model, self._config.run.seed + (epoch << 64))
        progress.tables_epoch, progress.tables_start = epoch, progress.updates

    def _batches_left(self, epoch: int) -> Iterator[SentBatch]:
        if self._has_ended(epoch):
            return
        # Repeat an evaluation during which the run was stopped.
        self._evaluate_if_due()
        self._clock.go_on()
        yield from prefetch(
            self._batches,
            self._run.job.front,
            self._run.processes.device,
            lambda: self._reader.state_dict(self._batches),
            self._run.processes.heartbeat,
        )

    def _has_ended(self, epoch: int) -> bool:
        return self._progress.reader.get("epoch", epoch) > epoch

    def _step(self, sent: SentBatch, epoch: int) -> Tensor:
        """Take a step, log what is due, and return the loss."""
        run, progress, train = self._run, self._progress, self._config.train
        rates = self._learning_rates()
        run.job.set_learning_rates(*rates)
        watch = self._clip_watch if self._clip_watch.watches(progress.step + 1) else None
        loss = train_step(run.job, sent, progress.step + 1, run.processes, watch)
        progress.step += 1
        progress.samples += sent.batch.global_samples
        progress.reader = sent.position
        self._monitor.after_step(progress.step)
        if run.job.skips_nonfinite and count_if_skipped(loss, progress):
            run.log({"kind": "skipped_batch", "step": progress.step, "loss": loss.item()})
        elif watch is not None:
            run.log({"kind": "clipping", "step": progress.step, **watch.take()})
        ended = self._has_ended(epoch)
        logs = progress.step % train.log_every == 0 or ended
        self._unchecked = None if logs else loss
        if logs:
            self._log_step(epoch, loss.item(), rates)
            check_logged_loss(loss.item(), progress, train.on_divergence)
        timing = self._monitor.line(progress.step, ended)
        if timing is not None:
            run.log(timing)
        return loss

    def _evaluate_and_save_if_due(self, epoch: int) -> None:
        if self._has_ended(epoch) and is_evaluated(epoch + 1, self._config):
            # The end of the epoch does both.
            return
        self._evaluate_if_due()
        step, every = self._progress.step, self._config.checkpoint.every_steps
        if self._agree(step) or (every and step % every == 0):
            self._save()

    def _evaluate_if_due(self) -> None:
        progress, every = self._progress, self._config.evaluate.every
        if every and progress.step % every == 0 and progress.evaluated_step != progress.step:
            with self._clock.paused():
                self._evaluate()

    def _evaluate(self) -> dict[str, dict[str, Any]]:
        return evaluate_run(self._run, self._reader, self._agree)

    def _finish_epoch(self, epoch: int) -> None:
        run, progress, config = self._run, self._progress, self._config
        if not is_evaluated(epoch + 1, config):
            # The next epoch follows at once, without bringing rows up to date.
            progress.epoch = epoch + 1
            return
        self._clock.pause()
        if run.dataset.period:
            progress.epoch = epoch + 1
            self._save()
            return
        # Evaluate before saving: weights may have diverged in the last step.
        results = self._evaluate()
        finish_epoch(run, results)
        if progress.epoch == min(config.evaluate.every_epochs, config.train.epochs):
            selecting = config.evaluate.select_on
            found_off = on_first_epoch(selecting, results[selecting]["auc"], progress.epoch)
            tell(found_off, progress.step, run.folder, run.processes)
            progress.metrics_lines = run.folder.metrics_lines
        self._save()

    def _agree(self, number: int) -> bool:
        """Whether a checkpoint is due; raises on all ranks if any was asked to stop."""
        asked, due = self._agreement.after(number)
        if asked:
            raise _StopRequestedError(asked)
        return due

    def _save(self) -> None:
        run, heartbeat = self._run, self._run.processes.heartbeat
        with self._clock.paused():
            heartbeat.beat("saving")
            if self._unchecked is not None:
                check_loss(self._unchecked, self._progress, self._config.train.on_divergence)
            run.add_row_counts()
            run.processes.on_main(run.folder.sync)
            # The previous save may still be running.
            with heartbeat.slowly("saving"):
                self._checkpoints.save(self._progress)
            self._agreement.saved()

    def _stop(self, number: int) -> None:
        saved = "saved; checkpoint.resume=auto continues from there"
        try:
            self._save()
            with self._run.processes.heartbeat.slowly("saving"):
                self._checkpoints.wait()
        except DivergedError as failure:
            saved = f"not saved, as {failure.reason}; checkpoint.resume=auto continues from the "
            saved += "newest checkpoint"
        # Other processes may still use a connection to this one.
        dist.barrier()
        name, step = signal.Signals(number).name, self._progress.step
        raise InterruptedRunError(
            f"stopped by {name} after step {step:,}, which is {saved}", number
        )

    @contextmanager
    def _noting_a_stop(self) -> Iterator[None]:
        """Log why training inside the context stops."""
        try:
            yield
        except TrainingStoppedError as stop:
            step = self._progress.step if stop.step is None else stop.step
            with suppress(TrainingStoppedError):
                self._run.log({"kind": "stopped", "step": step, "reason": str(stop)})
            raise

    def _learning_rates(self) -> list[float]:
        """The rates of the next step: of the tables and of the dense layers."""
        train, progress = self._config.train, self._progress
        rates = learning_rates(
            self._config,
            self._run.job.scaling.scaled,
            progress.step,
            steps_per_epoch=self._run.dataset.train.rows / train.batch_size,
            total_steps=len(self._batches) * train.epochs,
        )
        plateaus = progress.table_plateau, progress.plateau
        return [rate * Plateau(**at).fraction for rate, at in zip(rates, plateaus, strict=True)]

    def _log_step(self, epoch: int, loss: float, rates: list[float]) -> None:
        self._run.add_row_counts()
        progress, (embedding_lr, dense_lr) = self._progress, rates
        self._run.log(
            {
                "kind": "train",
                "step": progress.step,
                "epoch": epoch + 1,
                "loss": loss,
                "dense_lr": dense_lr,
                "embedding_lr": embedding_lr,
                "clipped_share": clipped_share(progress),
                "skipped_rows": progress.skipped_rows,
                "samples_per_second": self._clock.samples_per_second(),
            }
        )


class _TrainingClock:
    """Adds the seconds of training to the progress, without evaluations and saves.

    Pausing brings waiting rows up to date, which counts as training.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._since: float | None = None
        self._since_rate = (0.0, 0)

    def go_on(self) -> None:
        """Start the clock if it is paused."""
        if self._since is None:
            self._since = time.perf_counter()
            self._since_rate = (self._since, self._run.progress.samples)

    def pause(self) -> None:
        """Bring all rows up to date and pause the clock, unless it is paused."""
        if self._since is None:
            return
        run = self._run
        run.processes.heartbeat.beat("updating waiting rows")
        flush_tables(run.job, run.progress.step, run.processes.device)
        run.progress.train_seconds += time.perf_counter() - self._since
        self._since = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause inside the context; a failure leaves the clock paused."""
        running = self._since is not None
        self.pause()
        yield
        if running:
            self.go_on()

    def samples_per_second(self) -> float:
        """The rate since the last call, or since the clock started."""
        since, samples = self._since_rate
        self._since_rate = now, trained = time.perf_counter(), self._run.progress.samples
        return (trained - samples) / (now - since)


def count_if_skipped(loss: Tensor, progress: Progress) -> bool:
    """Count the newest batch as skipped if its loss is not finite; return whether it is.

    Raises:
        DivergedError: too many in a row.
    """
    if math.isfinite(loss):
        progress.skipped_in_a_row = 0
        return False
    progress.skipped_batches += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row >= _MOST_SKIPPED:
        raise DivergedError(
            f"the losses of {_MOST_SKIPPED} steps in a row, up to step {progress.step}, are not "
            "finite; none of these steps changed the weights",
            progress.step,
        )
    return True


def check_logged_loss(loss: float, progress: Progress, settings: DivergenceSection) -> None:
    """`check_loss`, then remember the loss."""
    check_loss(loss, progress, settings)
    if settings.loss_factor and math.isfinite(loss):
        progress.logged_losses = [*progress.logged_losses, loss][-settings.window :]


def check_loss(loss: Tensor | float, progress: Progress, settings: DivergenceSection) -> None:
    """Compare a loss with earlier logged ones, with a `DivergedError`; all ranks have the same."""
    before = progress.logged_losses[-settings.window :]
    # A loss is read from a GPU only if it is compared. The step checks that it is finite.
    if not settings.loss_factor or len(before) < settings.window or not math.isfinite(loss):
        return
    usual = statistics.median(before)
    # Batches without weight have a loss of 0, which is not a reference.
    if usual and loss > settings.loss_factor * usual:
        raise DivergedError(
            f"the loss {loss:.4g} of step {progress.step} is more than {settings.loss_factor:g} "
            f"times {usual:.4g}, the median of the {settings.window} losses logged before it "
            "(train.on_divergence.loss_factor)",
            progress.step,
        )
