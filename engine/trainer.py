"""The training loop: steps, epochs, when to evaluate and when to save."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from tqdm.auto import tqdm

from stampede.data import Dataset
from stampede.engine.ahead import SentBatch, sent_ahead
from stampede.engine.checkpoint import Checkpoints, Progress
from stampede.engine.clip_watch import ClipWatch
from stampede.engine.config import Config
from stampede.engine.console import progress_bar
from stampede.engine.divergence import check_logged_loss, check_loss, count_if_skipped
from stampede.engine.errors import DivergedError, InterruptedRunError, TrainingStoppedError
from stampede.engine.evaluations import Evaluations
from stampede.engine.job import Job
from stampede.engine.learning_rates import LearningRates, learning_rates, set_learning_rates
from stampede.engine.monitor import Monitor
from stampede.engine.processes import Processes
from stampede.engine.reading import Reader
from stampede.engine.row_counts import add_row_counts
from stampede.engine.run_folder import RunFolder
from stampede.engine.selection import Plateau, is_evaluated, stops_early
from stampede.engine.step import train_step
from stampede.engine.stop import Agreement, StopSignals
from stampede.engine.summary import clipped_share
from stampede.engine.training_time import TrainingTime


class _StopRequestedError(Exception):
    """All ranks have agreed to stop, for a signal."""


@dataclass
class Trainer:
    """Trains a job.

    Attributes:
        config, dataset, job, processes: what is trained, and by whom.
        folder: where results go; written by rank 0.
        progress: how far the run has come.
    """

    config: Config
    dataset: Dataset
    job: Job
    processes: Processes
    folder: RunFolder
    progress: Progress

    def fit(self) -> Progress:
        """Train all epochs that are not done yet.

        Raises:
            TrainingStoppedError: the run diverged, or a file cannot be written.
            InterruptedRunError: SIGTERM or SIGINT asked to stop; a checkpoint was written.
            RunFolderError, SettingsError, DataError: the data cannot be read as asked.
        """
        config = self.config
        self._reader = Reader(config, self.dataset, self.processes)
        self._watch = ClipWatch(config, self.job, self.processes)
        self._time = TrainingTime(self.job, self.processes, self.progress)
        self._unlogged: Tensor | None = None
        self._batches = self._reader.training()
        if self.progress.reader:
            self._reader.load_state_dict(self._batches, self.progress.reader)
        signals = StopSignals()
        self._agreement = Agreement(self.processes, signals, config.checkpoint.every_minutes)
        self._evaluations = Evaluations(
            config, self.job, self._reader, self.processes, self.folder, self._agree
        )
        total = self.dataset.train.rows * config.train.epochs
        with (
            self._noting_a_stop(),
            signals.watched(),
            Monitor(config, self.processes, self.folder.path, self.progress.step) as self._monitor,
            Checkpoints(
                self.folder.checkpoints, self.job, config, self.dataset, self.processes
            ) as self._checkpoints,
            progress_bar(total, self.progress.samples, self.processes.is_main) as bar,
        ):
            try:
                self._train(bar)
            except _StopRequestedError as stop:
                self._stop(*stop.args)
        return self.progress

    @contextmanager
    def _noting_a_stop(self) -> Iterator[None]:
        """Log why the training within it stops."""
        try:
            yield
        except TrainingStoppedError as stop:
            step = self.progress.step if stop.step is None else stop.step
            line = {"kind": "stopped", "step": step, "reason": str(stop)}
            with suppress(TrainingStoppedError):
                self.processes.on_main(lambda: self.folder.log(line))
            raise

    def _train(self, bar: tqdm) -> None:
        progress, config = self.progress, self.config
        for epoch in range(progress.epoch, config.train.epochs):
            if stops_early(progress, config.evaluate):
                break
            self._train_epoch(epoch, bar)
            self._finish_epoch(epoch)
        if not progress.last:
            # The run goes on with fewer epochs than it had begun, and evaluated none.
            self._evaluations.within_epoch(progress)

    def _train_epoch(self, epoch: int, bar: tqdm) -> None:
        """Train what is left of an epoch."""
        progress = self.progress
        if progress.reader.get("epoch", epoch) > epoch:
            return
        # A run that was stopped in this evaluation had not finished it.
        self._evaluate_if_due()
        self._time.go_on()
        for sent in sent_ahead(
            self._batches,
            self.job.front,
            self.processes.device,
            lambda: self._reader.state_dict(self._batches),
            self.processes.pulse,
        ):
            rates = self._learning_rates()
            set_learning_rates(self.job, rates)
            loss = self._step(sent)
            progress.reader = sent.position
            bar.update(sent.batch.global_samples)
            ended = sent.position["epoch"] > epoch
            logs = progress.step % self.config.train.log_every == 0 or ended
            # To read a GPU's loss is to wait for it.
            if logs or not loss.is_cuda:
                bar.set_postfix(loss=f"{loss.item():.4f}", epoch=epoch + 1, refresh=False)
            self._unlogged = None if logs else loss
            if logs:
                self._log_training(epoch, loss.item(), rates)
                check_logged_loss(loss.item(), progress, self.config.train.on_divergence)
            timing = self._monitor.line(progress.step, ended)
            if timing is not None:
                self._log(timing)
            # Else the epoch's end evaluates and saves.
            if not (ended and is_evaluated(epoch + 1, self.config)):
                self._evaluate_if_due()
                every = self.config.checkpoint.every_steps
                due = every and progress.step % every == 0
                if self._agree(progress.step) or due:
                    self._save()

    def _step(self, sent: SentBatch) -> Tensor:
        progress = self.progress
        watch = self._watch if self._watch.watches(progress.step + 1) else None
        loss = train_step(self.job, sent, progress.step + 1, self.processes, watch)
        progress.step += 1
        progress.samples += sent.batch.global_samples
        self._monitor.after_step(progress.step)
        if count_if_skipped(loss, progress, self.job):
            self._log({"kind": "skipped_batch", "step": progress.step, "loss": loss.item()})
        elif watch is not None:
            self._log({"kind": "clipping", "step": progress.step, **watch.take()})
        return loss

    def _evaluate_if_due(self) -> None:
        progress, every = self.progress, self.config.evaluate.every
        if every and progress.step % every == 0 and progress.evaluated_step != progress.step:
            with self._time.paused():
                self._evaluations.within_epoch(progress)

    def _finish_epoch(self, epoch: int) -> None:
        if not is_evaluated(epoch + 1, self.config):
            # The next one follows at once: rows need not be brought up to date between them.
            self.progress.epoch = epoch + 1
            return
        self._time.pause()
        # Nothing is saved unseen: weights may have diverged in the last step.
        self._evaluations.after_epoch(self.progress)
        self._save()

    def _agree(self, number: int) -> bool:
        """Whether a checkpoint is due after a step or a batch of an evaluation.

        Raises:
            _StopRequestedError: on all ranks, if any was asked to stop.
        """
        asked, due = self._agreement.after(number)
        if asked:
            raise _StopRequestedError(asked)
        return due

    def _save(self) -> None:
        with self._time.paused():
            self.processes.pulse.beat("saving")
            if self._unlogged is not None:
                check_loss(self._unlogged, self.progress, self.config.train.on_divergence)
            add_row_counts(self.progress, self.job, self.processes.device)
            self.processes.on_main(self.folder.sync)
            # The one before may still be written.
            with self.processes.pulse.slowly("saving"):
                self._checkpoints.save(self.progress)
            self._agreement.saved()

    def _stop(self, number: int) -> None:
        saved = "saved; checkpoint.resume=auto continues from there"
        try:
            self._save()
            with self.processes.pulse.slowly("saving"):
                self._checkpoints.wait()
        except DivergedError as failure:
            saved = (
                f"not saved, as {failure.reason}; checkpoint.resume=auto continues from the newest "
                "checkpoint"
            )
        # No process ends while another still uses a connection to it.
        dist.barrier()
        raise InterruptedRunError(
            f"stopped by {signal.Signals(number).name} after step {self.progress.step:,}, which is "
            f"{saved}",
            number,
        )

    def _learning_rates(self) -> LearningRates:
        """Rates of the next step."""
        train = self.config.train
        rates = learning_rates(
            self.config,
            self.job.scaling.scaled,
            self.progress.step,
            steps_per_epoch=self.dataset.train.rows / train.batch_size,
            total_steps=len(self._batches) * train.epochs,
        )
        progress = self.progress
        return rates._replace(
            embedding=rates.embedding * Plateau(**progress.table_plateau).fraction,
            dense=rates.dense * Plateau(**progress.plateau).fraction,
        )

    def _log_training(self, epoch: int, loss: float, rates: LearningRates) -> None:
        add_row_counts(self.progress, self.job, self.processes.device)
        progress = self.progress
        line = {
            "kind": "train",
            "step": progress.step,
            "epoch": epoch + 1,
            "loss": loss,
            "dense_lr": rates.dense,
            "embedding_lr": rates.embedding,
            "clipped_share": clipped_share(progress),
            "skipped_rows": progress.skipped_rows,
            "samples_per_second": self._time.samples_per_second(),
        }
        self._log(line)

    def _log(self, line: dict[str, Any]) -> None:
        self.processes.on_main(lambda: self.folder.log(line))
        self.progress.metrics_lines = self.folder.metrics_lines
