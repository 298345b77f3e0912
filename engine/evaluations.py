"""The evaluations of a run, and what it decides by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

from tqdm.auto import tqdm

from stampede.engine.advice import on_first_epoch, tell
from stampede.engine.checkpoint import Progress
from stampede.engine.config import Config
from stampede.engine.console import readable_metric
from stampede.engine.errors import DivergedError
from stampede.engine.evaluate import Evaluation, evaluate
from stampede.engine.job import Job
from stampede.engine.processes import Processes
from stampede.engine.reading import Reader
from stampede.engine.run_folder import RunFolder
from stampede.engine.selection import Plateau, choose, stops_early


class Evaluations:
    """Scores the validation and the test part, logs it and decides by it.

    An evaluation that is broken off has changed nothing but lines of the log, see
    `Progress.metrics_lines`.

    Args:
        config, job, reader, processes: what is evaluated, and by whom.
        folder: where it is logged.
        on_batch: called on all ranks after every batch with its number, counted from 1.
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        reader: Reader,
        processes: Processes,
        folder: RunFolder,
        on_batch: Callable[[int], None],
    ) -> None:
        self._config = config
        self._job = job
        self._reader = reader
        self._processes = processes
        self._folder = folder
        self._on_batch = on_batch

    def within_epoch(self, progress: Progress) -> None:
        """Evaluate after a step; tables must be up to date.

        Raises:
            DivergedError: a logloss is not finite.
        """
        self._evaluate(progress)

    def after_epoch(self, progress: Progress) -> None:
        """Evaluate after an epoch and count it as finished.

        Raises:
            DivergedError: a logloss is not finite.
        """
        settings = self._config.evaluate
        results = self._evaluate(progress)
        progress.epoch += 1
        choose(progress, results, settings.select_on)
        if self._processes.is_main:
            shown = ", ".join(
                f"{name} AUC {readable_metric(result.auc)} logloss {result.logloss:.4f}"
                for name, result in results.items()
            )
            tqdm.write(f"epoch {progress.epoch}: {shown}")
            if stops_early(progress, settings) and progress.epoch < self._config.train.epochs:
                tqdm.write(
                    f"stopping early: no better AUC on the {settings.select_on} part since epoch "
                    f"{progress.best_epoch}"
                )
        if progress.epoch == min(settings.every_epochs, self._config.train.epochs):
            score = results[settings.select_on].auc
            found_off = on_first_epoch(settings.select_on, score, progress.epoch)
            tell(found_off, progress.step, self._folder, self._processes)
            progress.metrics_lines = self._folder.metrics_lines

    def _evaluate(self, progress: Progress) -> dict[str, Evaluation]:
        dataset = self._reader.dataset
        parts = {"test": dataset.test}
        if dataset.validation is not None:
            parts = {"validation": dataset.validation, **parts}
        results = {}
        for name, part in parts.items():
            result = evaluate(
                self._job.model,
                self._reader.evaluation(part),
                self._processes,
                self._config.evaluate,
                self._on_batch,
            )
            results[name] = result
            line = {
                "kind": "evaluation",
                "part": name,
                "step": progress.step,
                "train_seconds": progress.train_seconds,
                **result.as_dict(),
            }
            self._processes.on_main(lambda line=line: self._folder.log(line))
            if not math.isfinite(result.logloss):
                raise DivergedError(
                    f"the logloss of the {name} part is {result.logloss} after step "
                    f"{progress.step}",
                    progress.step,
                )
        progress.last = {part: result.as_dict() for part, result in results.items()}
        progress.evaluated_step = progress.step
        progress.metrics_lines = self._folder.metrics_lines
        self._reduce_rates(progress, results[self._config.evaluate.select_on].auc)
        return results

    def _reduce_rates(self, progress: Progress, score: float | None) -> None:
        optim = self._config.optim
        for what, name, settings in (
            ("dense layers", "plateau", optim.dense.plateau),
            ("tables", "table_plateau", optim.embedding.plateau),
        ):
            before = Plateau(**getattr(progress, name))
            after = before.after(score, settings)
            setattr(progress, name, asdict(after))
            if after.fraction < before.fraction and self._processes.is_main:
                tqdm.write(
                    f"step {progress.step}: no better AUC on the {self._config.evaluate.select_on} "
                    f"part, the {what} go on with {after.fraction:.3g} of their scheduled rate"
                )
