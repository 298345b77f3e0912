"""The training loop: epochs, evaluation, checkpoints, metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm

from stampede.data import Dataset, GlobalBatches
from stampede.engine import checkpoint
from stampede.engine.ahead import sent_ahead
from stampede.engine.checkpoint import Progress
from stampede.engine.clip_watch import ClipWatch
from stampede.engine.config import Config
from stampede.engine.console import progress_bar, readable_auc
from stampede.engine.errors import TrainingStoppedError
from stampede.engine.evaluate import Evaluation, evaluate
from stampede.engine.job import Job
from stampede.engine.learning_rates import LearningRates, learning_rates, set_learning_rates
from stampede.engine.processes import Processes
from stampede.engine.reading import Reader
from stampede.engine.run_folder import RunFolder
from stampede.engine.selection import Plateau, choose, is_evaluated, stops_early
from stampede.engine.step import WHAT_TO_TRY, stopping, train_step
from stampede.engine.summary import clipped_share
from stampede.optim import local_cowclip_tables


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
            RunFolderError, SettingsError, DataError: the data cannot be read as asked.
        """
        self._reader = Reader(self.config, self.dataset, self.processes)
        self._watch = ClipWatch(self.config, self.job, self.processes)
        batches = self._reader.training()
        if self.progress.reader:
            self._reader.load_state_dict(batches, self.progress.reader)
        total = self.dataset.train.rows * self.config.train.epochs
        with progress_bar(total, self.progress.samples, self.processes.is_main) as bar:
            for epoch in range(self.progress.epoch, self.config.train.epochs):
                if stops_early(self.progress, self.config.evaluate):
                    break
                self._train_epoch(epoch, batches, bar)
                self.progress.epoch = epoch + 1
                self.progress.reader = self._reader.state_dict(batches)
                if is_evaluated(epoch + 1, self.config):
                    # Nothing is saved unseen: weights may have diverged in the last step.
                    self._evaluate_epoch()
                    checkpoint.save(
                        self.folder.checkpoints,
                        self.job,
                        self.progress,
                        self.config,
                        self.dataset,
                        self.processes,
                    )
        return self.progress

    def _train_epoch(self, epoch: int, batches: GlobalBatches, bar: tqdm) -> None:
        progress, every = self.progress, self.config.evaluate.every
        start = time.perf_counter()
        since_log = (start, progress.samples)
        for index, sent in enumerate(sent_ahead(batches, self.job.front, self.processes.device)):
            rates = self._learning_rates(len(batches))
            set_learning_rates(self.job, rates)
            with self._noting_a_stop(progress.step + 1):
                watch = self._watch if self._watch.watches(progress.step + 1) else None
                loss = train_step(self.job, sent, progress.step + 1, self.processes, watch)
            progress.step += 1
            if watch is not None:
                line = {"kind": "clipping", "step": progress.step, **watch.take()}
                self.processes.on_main(lambda line=line: self.folder.log(line))
            progress.samples += sent.batch.global_samples
            bar.update(sent.batch.global_samples)
            last = index + 1 == len(batches)
            logs = progress.step % self.config.train.log_every == 0 or last
            # To read a GPU's loss is to wait for it.
            if logs or not loss.is_cuda:
                bar.set_postfix(loss=f"{loss.item():.4f}", epoch=epoch + 1, refresh=False)
            if logs:
                since_log = self._log_training(epoch, loss.item(), rates, since_log)
            if every and progress.step % every == 0 and not last:
                self._flush_tables()
                progress.train_seconds += time.perf_counter() - start
                self._evaluate_all()
                start = time.perf_counter()
                since_log = (start, progress.samples)
        self._flush_tables()
        progress.train_seconds += time.perf_counter() - start

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

    @contextmanager
    def _noting_a_stop(self, step: int) -> Iterator[None]:
        try:
            yield
        except TrainingStoppedError as stop:
            line = {"kind": "stopped", "step": stop.step or step, "reason": str(stop)}
            self.processes.on_main(lambda: self.folder.log(line))
            raise

    def _learning_rates(self, batches: int) -> LearningRates:
        """Rates of the next step, in epochs of so many batches."""
        train = self.config.train
        rates = learning_rates(
            self.config,
            self.job.scaling.scaled,
            self.progress.step,
            steps_per_epoch=self.dataset.train.rows / train.batch_size,
            total_steps=batches * train.epochs,
        )
        return rates._replace(dense=rates.dense * Plateau(**self.progress.plateau).fraction)

    def _log_training(
        self, epoch: int, loss: float, rates: LearningRates, since: tuple[float, int]
    ) -> tuple[float, int]:
        self._count_rows()
        now, progress = time.perf_counter(), self.progress
        line = {
            "kind": "train",
            "step": progress.step,
            "epoch": epoch + 1,
            "loss": loss,
            "dense_lr": rates.dense,
            "embedding_lr": rates.embedding,
            "clipped_share": clipped_share(progress),
            "skipped_rows": progress.skipped_rows,
            "samples_per_second": (progress.samples - since[1]) / (now - since[0]),
        }
        self.processes.on_main(lambda: self.folder.log(line))
        return now, progress.samples

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

    def _evaluate_all(self) -> dict[str, Evaluation]:
        dataset = self._reader.dataset
        parts = {"test": dataset.test}
        if dataset.validation is not None:
            parts = {"validation": dataset.validation, **parts}
        results = {}
        for name, part in parts.items():
            result = evaluate(
                self.job.model,
                self._reader.evaluation(part),
                self.processes,
                self.config.evaluate,
                self.folder.path,
            )
            results[name] = result
            line = {
                "kind": "evaluation",
                "part": name,
                "step": self.progress.step,
                "train_seconds": self.progress.train_seconds,
                **result.as_dict(),
            }
            self.processes.on_main(lambda line=line: self.folder.log(line))
            if not math.isfinite(result.logloss):
                raise TrainingStoppedError(
                    f"the logloss of the {name} part is {result.logloss} after step "
                    f"{self.progress.step}; {WHAT_TO_TRY}"
                )
        self.progress.last = results["test"].as_dict()
        self._reduce_rates(results[self.config.evaluate.select_on].auc)
        return results

    def _reduce_rates(self, score: float | None) -> None:
        before = Plateau(**self.progress.plateau)
        after = before.after(score, self.config.optim.dense.plateau)
        self.progress.plateau = asdict(after)
        if after.fraction < before.fraction and self.processes.is_main:
            tqdm.write(
                f"step {self.progress.step}: no better AUC on the {self.config.evaluate.select_on} "
                f"part, the dense layers go on with {after.fraction:.3g} of their scheduled rate"
            )

    def _evaluate_epoch(self) -> None:
        """Evaluate after an epoch, and decide what follows from it."""
        progress, settings = self.progress, self.config.evaluate
        results = self._evaluate_all()
        choose(progress, results, settings.select_on)
        if self.processes.is_main:
            shown = ", ".join(
                f"{name} AUC {readable_auc(result.auc)} logloss {result.logloss:.4f}"
                for name, result in results.items()
            )
            tqdm.write(f"epoch {progress.epoch}: {shown}")
            if stops_early(progress, settings) and progress.epoch < self.config.train.epochs:
                tqdm.write(
                    f"stopping early: no better AUC on the {settings.select_on} part since epoch "
                    f"{progress.best_epoch}"
                )
