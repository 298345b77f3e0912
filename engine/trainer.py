"""The training loop: steps, epochs, when to evaluate and when to save."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from stampede.data import Dataset
from stampede.engine.agreement import Agreement
from stampede.engine.ahead import SentBatch, sent_ahead
from stampede.engine.checkpoint import Checkpoints, Progress
from stampede.engine.clip_watch import ClipWatch
from stampede.engine.config import Config
from stampede.engine.console import progress_bar
from stampede.engine.errors import InterruptedRunError, TrainingStoppedError
from stampede.engine.evaluations import Evaluations
from stampede.engine.job import Job
from stampede.engine.learning_rates import LearningRates, learning_rates, set_learning_rates
from stampede.engine.processes import Processes
from stampede.engine.reading import Reader
from stampede.engine.run_folder import RunFolder
from stampede.engine.selection import Plateau, is_evaluated, stops_early
from stampede.engine.step import stopping, train_step
from stampede.engine.stop_signals import StopSignals
from stampede.engine.summary import clipped_share
from stampede.optim import local_cowclip_tables


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
            TrainingStoppedError: the loss is not finite, or a file cannot be written.
            InterruptedRunError: SIGTERM or SIGINT asked to stop; a checkpoint was written.
            RunFolderError, SettingsError, DataError: the data cannot be read as asked.
        """
        progress, config = self.progress, self.config
        self._reader = Reader(config, self.dataset, self.processes)
        self._watch = ClipWatch(config, self.job, self.processes)
        self._batches = self._reader.training()
        self._since: float | None = None
        if progress.reader:
            self._reader.load_state_dict(self._batches, progress.reader)
        signals = StopSignals()
        self._agreement = Agreement(self.processes, signals, config.checkpoint.every_minutes)
        self._evaluations = Evaluations(
            config, self.job, self._reader, self.processes, self.folder, self._agree
        )
        total = self.dataset.train.rows * config.train.epochs
        with (
            signals.watched(),
            self._saved_in_the_end(
                Checkpoints(self.folder.checkpoints, self.job, config, self.dataset, self.processes)
            ) as self._checkpoints,
            progress_bar(total, progress.samples, self.processes.is_main) as bar,
        ):
            try:
                for epoch in range(progress.epoch, config.train.epochs):
                    if stops_early(progress, config.evaluate):
                        break
                    self._train_epoch(epoch, bar)
                    self._finish_epoch(epoch)
                if not progress.last:
                    # The run goes on with fewer epochs than it had begun, and evaluated none.
                    self._evaluations.within_epoch(progress)
            except _StopRequestedError as stop:
                self._stop(*stop.args)
        return progress

    def _train_epoch(self, epoch: int, bar: tqdm) -> None:
        """Train what is left of an epoch."""
        progress = self.progress
        if progress.reader.get("epoch", epoch) > epoch:
            return
        # A run that was stopped in this evaluation had not finished it.
        self._evaluate_if_due()
        self._go_on()
        for sent in sent_ahead(
            self._batches,
            self.job.front,
            self.processes.device,
            lambda: self._reader.state_dict(self._batches),
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
            if logs:
                self._log_training(epoch, loss.item(), rates)
            # Else the epoch's end evaluates and saves.
            if not (ended and is_evaluated(epoch + 1, self.config)):
                self._evaluate_if_due()
                every = self.config.checkpoint.every_steps
                due = every and progress.step % every == 0
                if self._agree(progress.step) or due:
                    self._save()
        self._pause()

    def _step(self, sent: SentBatch) -> Tensor:
        progress = self.progress
        with self._noting_a_stop(progress.step + 1):
            watch = self._watch if self._watch.watches(progress.step + 1) else None
            loss = train_step(self.job, sent, progress.step + 1, self.processes, watch)
        progress.step += 1
        progress.samples += sent.batch.global_samples
        if watch is not None:
            self._log({"kind": "clipping", "step": progress.step, **watch.take()})
        return loss

    def _evaluate_if_due(self) -> None:
        progress, every = self.progress, self.config.evaluate.every
        if every and progress.step % every == 0 and progress.evaluated_step != progress.step:
            with self._not_training():
                self._evaluations.within_epoch(progress)

    def _finish_epoch(self, epoch: int) -> None:
        if not is_evaluated(epoch + 1, self.config):
            self.progress.epoch = epoch + 1
            return
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
        with self._not_training():
            self.processes.pulse.beat("saving")
            self._count_rows()
            self.processes.on_main(self.folder.sync)
            # The one before may still be written.
            with self.processes.pulse.slowly("saving"):
                self._checkpoints.save(self.progress)
            self._agreement.saved()

    @contextmanager
    def _saved_in_the_end(self, checkpoints: Checkpoints) -> Iterator[Checkpoints]:
        """The context of `checkpoints`, whose end waits for what is still being written."""

        def end(*raised: Any) -> bool | None:
            with self.processes.pulse.slowly("saving"):
                return checkpoints.__exit__(*raised)

        with ExitStack() as stack:
            stack.push(end)
            yield checkpoints.__enter__()

    def _stop(self, number: int) -> None:
        self._save()
        with self.processes.pulse.slowly("saving"):
            self._checkpoints.wait()
        # No process ends while another still uses a connection to it.
        dist.barrier()
        raise InterruptedRunError(
            f"stopped by {signal.Signals(number).name} after step {self.progress.step:,}, which is "
            "saved; checkpoint.resume=auto continues from there",
            number,
        )

    def _flush_tables(self) -> None:
        """Let all rows take the steps they have missed, which is part of the time of training."""
        step = self.progress.step
        with self._noting_a_stop(step), stopping(step):
            # On every rank, whether it has tables or not.
            if self.job.table_update is not None:
                self.job.table_update.check_queued(up_to_now=True)
            for tables in local_cowclip_tables(self.job.model):
                tables.flush()
        if self.processes.device.type == "cuda":
            torch.cuda.synchronize(self.processes.device)

    def _go_on(self) -> None:
        """The time from here on is that of training."""
        self._since = time.perf_counter()
        self._since_log = (self._since, self.progress.samples)

    def _pause(self) -> None:
        """The time of training ends here, once all rows are up to date."""
        self._flush_tables()
        self.progress.train_seconds += time.perf_counter() - self._since
        self._since = None

    @contextmanager
    def _not_training(self) -> Iterator[None]:
        paused = self._since is not None
        if paused:
            self._pause()
        yield
        if paused:
            self._go_on()

    @contextmanager
    def _noting_a_stop(self, step: int) -> Iterator[None]:
        try:
            yield
        except TrainingStoppedError as stop:
            line = {"kind": "stopped", "step": stop.step or step, "reason": str(stop)}
            self.processes.on_main(lambda: self.folder.log(line))
            raise

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
        return rates._replace(dense=rates.dense * Plateau(**self.progress.plateau).fraction)

    def _log_training(self, epoch: int, loss: float, rates: LearningRates) -> None:
        self._count_rows()
        now, progress = time.perf_counter(), self.progress
        since, samples = self._since_log
        line = {
            "kind": "train",
            "step": progress.step,
            "epoch": epoch + 1,
            "loss": loss,
            "dense_lr": rates.dense,
            "embedding_lr": rates.embedding,
            "clipped_share": clipped_share(progress),
            "skipped_rows": progress.skipped_rows,
            "samples_per_second": (progress.samples - samples) / (now - since),
        }
        self._log(line)
        self._since_log = now, progress.samples

    def _log(self, line: dict[str, Any]) -> None:
        self.processes.on_main(lambda: self.folder.log(line))
        self.progress.metrics_lines = self.folder.metrics_lines

    def _count_rows(self) -> None:
        """Add what the tables of all ranks counted since the last call."""
        counts = torch.zeros(3, dtype=torch.int64, device=self.processes.device)
        for tables in local_cowclip_tables(self.job.model):
            counts += tables.row_counts
            tables.row_counts.zero_()
        dist.all_reduce(counts)
        touched, clipped, skipped = counts.tolist()
        self.progress.touched_rows += touched
        self.progress.clipped_rows += clipped
        self.progress.skipped_rows += skipped
