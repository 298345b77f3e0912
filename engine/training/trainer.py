"""The training loop: steps, epochs, when to evaluate and when to save."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor
from tqdm.auto import tqdm

from stampede.engine.advice import on_memory, tell
from stampede.engine.checkpoint.due import CheckpointDue
from stampede.engine.checkpoint.saving import Checkpoints
from stampede.engine.console import progress_bar
from stampede.engine.errors import DivergedError, InterruptedRunError, TrainingStoppedError
from stampede.engine.job.optimizers import LearningRates
from stampede.engine.memory import free_memory
from stampede.engine.reading import Reader
from stampede.engine.start_up import give_back_freed_memory
from stampede.engine.step import SentBatch, flush_tables, prefetch, train_step
from stampede.engine.training.averaging import EpochMean
from stampede.engine.training.diverging_loss import count_if_skipped
from stampede.engine.training.epoch_end import finish_epoch, is_evaluated
from stampede.engine.training.evaluate import evaluate_run
from stampede.engine.training.plateau import Plateau, stops_early
from stampede.engine.training.training_run import TrainingRun
from stampede.engine.watching.monitor import Monitor
from stampede.engine.watching.stop import Agreement, StopRequestedError

# Until then, blocks of memory that a step frees become blocks of the next.
_STEPS_UNTIL_SETTLED = 30

# After so many, what was freed goes back to the system; the next step pays some 0.4 s at most.
_SECONDS_OF_KEPT_MEMORY = 30.0


class Trainer:
    """Trains a run to its end, from wherever its progress is."""

    def __init__(self, run: TrainingRun) -> None:
        config, progress, processes = run.config, run.progress, run.processes
        self._run, self._config, self._progress = run, config, progress
        self._reader = Reader(config, run.dataset, processes)
        self._batches = self._reader.training()
        if progress.reader:
            self._reader.load_state_dict(self._batches, progress.reader)
        self._rates = LearningRates(
            config,
            run.job.scaling.scaled,
            steps_per_epoch=run.dataset.train.rows / config.train.batch_size,
            total_steps=len(self._batches) * config.train.epochs,
        )
        self._clock = _TrainingClock(run)
        self._settled = progress.step + _STEPS_UNTIL_SETTLED
        self._gave_back = time.perf_counter()
        self._mean = EpochMean(run.job, len(self._batches), config.train.averaging or 0)
        self._agreement = Agreement(processes)
        self._due = CheckpointDue(config.checkpoint, self._agreement)
        self._monitor = Monitor(config, processes, run.folder.path, progress.step)
        folder = run.folder
        self._checkpoints = Checkpoints(
            folder.checkpoints,
            run.job,
            config,
            run.dataset,
            processes,
            folder.publish,
            folder.apart,
        )

    def fit(self) -> None:
        """Train the remaining epochs.

        Raises:
            TrainingStoppedError: the run diverged, or a file cannot be written.
            InterruptedRunError: SIGTERM or SIGINT asked to stop; a checkpoint was written.
            RunFolderError, SettingsError, DataError: the data cannot be read as asked.
        """
        total = self._run.dataset.train.rows * self._config.train.epochs
        bar = progress_bar(total, self._progress.samples, self._run.processes.is_main)
        try:
            with self._agreement.noting_signals(), self._monitor, self._checkpoints, bar:
                try:
                    self._train(bar)
                except StopRequestedError as request:
                    self._stop(request)
        except TrainingStoppedError as stop:
            step = self._progress.step if stop.step is None else stop.step
            # The reason may be that nothing can be written.
            with suppress(TrainingStoppedError):
                self._run.log({"kind": "stopped", "step": step, "reason": str(stop)})
            raise

    def _train(self, bar: tqdm) -> None:
        progress, epochs = self._progress, self._config.train.epochs
        # The rows of a period are scored once, before they are trained on.
        is_period = bool(self._run.dataset.period)
        if is_period and not progress.last:
            self._evaluate()
        for epoch in range(progress.epoch, epochs):
            if stops_early(progress, self._config):
                break
            self._train_epoch(epoch, bar)
            if not is_evaluated(epoch + 1, self._config):
                # The next epoch follows at once, without bringing rows up to date.
                progress.epoch = epoch + 1
                continue
            self._clock.pause()
            if is_period:
                progress.epoch = epoch + 1
            else:
                finish_epoch(self._run, epoch + 1, self._evaluate)
            self._save()
            if self._run.is_enough():
                break
        if not progress.last:
            # A continued run with fewer epochs than already trained has not evaluated yet.
            self._evaluate()
            self._save()

    def _train_epoch(self, epoch: int, bar: tqdm) -> None:
        """Train the steps that are left of an epoch; evaluate and save between them."""
        run, progress, config = self._run, self._progress, self._config
        if progress.has_ended(epoch):
            return
        # Repeat an evaluation during which the run was stopped.
        self._evaluate_if_due()
        self._clock.go_on()
        for sent in prefetch(
            self._batches,
            run.job.front,
            run.processes.device,
            lambda: self._reader.state_dict(self._batches),
            run.processes.heartbeat,
        ):
            loss = self._step(sent, epoch)
            self._mean.after_step(self._step_of_epoch(epoch))
            bar.update(sent.batch.global_samples)
            # Reading a loss on a GPU waits for the GPU.
            if not loss.is_cuda or progress.step % config.train.log_every == 0:
                bar.set_postfix({"loss": f"{loss.item():.4f}", "epoch": epoch + 1}, refresh=False)
            if progress.has_ended(epoch) and is_evaluated(epoch + 1, config):
                # The end of the epoch evaluates and saves.
                continue
            self._evaluate_if_due()
            if self._due.after(progress.step):
                self._save()

    def _step(self, sent: SentBatch, epoch: int) -> Tensor:
        """Take a step, log what is due, and return the loss."""
        run, progress, train = self._run, self._progress, self._config.train
        plateaus = Plateau(**progress.table_plateau), Plateau(**progress.plateau)
        embedding_lr, dense_lr = (
            rate * plateau.fraction
            for rate, plateau in zip(self._rates.after(progress.step), plateaus, strict=True)
        )
        run.job.set_learning_rates(embedding_lr, dense_lr)
        step = progress.step + 1
        loss = train_step(run.job, sent, step, run.processes)
        progress.step = step
        progress.samples += sent.batch.global_samples
        progress.reader = sent.position
        self._monitor.after_step(step)
        if time.perf_counter() - self._gave_back > _SECONDS_OF_KEPT_MEMORY:
            give_back_freed_memory()
            self._gave_back = time.perf_counter()
        if step == self._settled:
            self._advise_on_memory()
        if run.job.skips_nonfinite and count_if_skipped(loss, progress):
            run.log({"kind": "skipped_batch", "step": step, "loss": loss.item()})
        ended = progress.has_ended(epoch)
        if step % train.log_every == 0 or ended:
            run.add_row_counts()
            run.log(
                {
                    "kind": "train",
                    "step": step,
                    "epoch": epoch + 1,
                    "loss": loss.item(),
                    "dense_lr": dense_lr,
                    "embedding_lr": embedding_lr,
                    "clipped_share": progress.clipped_share,
                    "skipped_rows": progress.skipped_rows,
                    "samples_per_second": self._clock.samples_per_second(),
                }
            )
        timing = self._monitor.line(step, ended)
        if timing is not None:
            run.log(timing)
        return loss

    def _advise_on_memory(self) -> None:
        here, cached = self._run.processes, self._reader.cached_bytes
        if cached:
            sentences = here.on_main(lambda: on_memory(cached, free_memory()))
            tell(sentences, self._progress.step, self._run.folder, here)

    def _step_of_epoch(self, epoch: int) -> int:
        """The number of steps that an epoch has had."""
        if self._progress.has_ended(epoch):
            return len(self._batches)
        return self._progress.reader["samples"] // self._config.train.batch_size

    def _evaluate_if_due(self) -> None:
        progress, every = self._progress, self._config.evaluate.every
        if every and progress.step % every == 0 and progress.evaluated_step != progress.step:
            with self._clock.paused():
                self._evaluate()

    def _evaluate(self) -> dict[str, dict[str, Any]]:
        return evaluate_run(self._run, self._reader, self._agreement.after)

    def _save(self) -> None:
        run, heartbeat = self._run, self._run.processes.heartbeat
        with self._clock.paused():
            heartbeat.beat("saving")
            run.add_row_counts()
            run.processes.on_main(run.folder.sync)
            # The previous save may still be running.
            with heartbeat.slowly("saving"):
                self._checkpoints.save(self._progress)
            self._due.saved()

    def _stop(self, request: StopRequestedError) -> None:
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
        raise InterruptedRunError(
            f"stopped by {request} after step {self._progress.step:,}, which is {saved}",
            request.signal,
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
