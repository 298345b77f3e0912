"""Evaluates the parts over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from stampede.data import Batch, GlobalBatches
from stampede.data.samples import aligned, by_goal
from stampede.engine.config import goal_weights, is_calibrated
from stampede.engine.config.evaluate import EvaluateSection
from stampede.engine.console import progress_bar
from stampede.engine.errors import DivergedError, TrainingStoppedError
from stampede.engine.metrics import PARTS, PartMetrics, over_goals
from stampede.engine.processes import Processes
from stampede.engine.reading import Reader
from stampede.engine.training.plateau import reduce_rates, selection_score
from stampede.engine.training.training_run import TrainingRun

# Prefix of metrics over samples with new ids.
NEW_IDS = "new_ids_"

# Fewest samples of all ranks that are sent to rank 0 at a time.
_TOGETHER = 1 << 17


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: GlobalBatches,
    processes: Processes,
    settings: EvaluateSection | None = None,
    on_batch: Callable[[int], None] | None = None,
    unseen_rows: Mapping[str, int] | None = None,
    goals: Mapping[str, float] | None = None,
    calibrates: bool = False,
) -> dict[str, Any]:
    """Score every sample once; the metrics by name, the same on every rank, see `PartMetrics`.

    Rank 0 collects and sorts the scores. It takes the samples in the order of the part, so equal
    scores give bit-equal metrics on any number of ranks. At least one weight must be above 0.

    Args:
        on_batch: called after every batch with its number, counted from 1; may raise on all ranks.
        unseen_rows: row of unseen ids, by field; adds metrics of the samples with such an id, as
            `new_ids_auc` etc.
        goals: several goals, in the order of the labels, with their weights in `over_goals`.
        calibrates: adds `logit_calibration`, see `PartMetrics.calibration`, of each goal.

    Raises:
        TrainingStoppedError: rank 0 has no memory for the scores.
    """
    settings = settings or EvaluateSection()
    model.eval()
    processes.heartbeat.beat("evaluating")
    scores = _Scores(processes, settings, batches, unseen_rows or {}, goals or {})
    is_main = processes.is_main
    with progress_bar(len(batches), 0, is_main, "evaluating", "batches", delay=5.0) as bar:
        for number, batch in enumerate(batches.epoch(0), 1):
            processes.heartbeat.beat("evaluating")
            batch = batch.to(processes.device, non_blocking=True)
            scores.add(batch, _logits(model, batch))
            bar.update()
            if on_batch is not None:
                on_batch(number)
        # Rank 0 sorts the scores, and the others wait for it.
        with processes.heartbeat.slowly("computing metrics"):
            found = scores.metrics(calibrates)
    model.train()
    return found


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    """`[n]` float32, tile by tile if the batch has tiles."""
    if not batch.tiles:
        return model(batch.sparse, batch.dense).float()
    size = len(batch.dense) // batch.tiles
    return model.module.tiled(batch.sparse, batch.dense, size, aligned).float()


class _Scores:
    """Collects the scores of all ranks on rank 0; each rank must make the same calls."""

    def __init__(
        self,
        processes: Processes,
        settings: EvaluateSection,
        batches: GlobalBatches,
        unseen_rows: Mapping[str, int],
        goals: Mapping[str, float],
    ) -> None:
        self._processes, self._settings = processes, settings
        self._rows, self._unseen_rows, self._goals = batches.rows, unseen_rows, goals
        unknown = batches.unknown_rows.get(settings.group_by, ())
        # A single label is one goal without a name.
        self._metrics = [
            PartMetrics(settings.metrics, samples=batches.rows, unknown_groups=unknown)
            for _ in goals or [""]
        ]
        self._metrics_of_new_ids = [PartMetrics(settings.metrics) for _ in goals or [""]]
        # Unsent scores of this rank, and the number of samples in their global batches.
        self._floats: list[Tensor] = []
        self._groups: list[Tensor] = []
        self._samples: list[int] = []

    def add(self, batch: Batch, logits: Tensor) -> None:
        """Take this rank's part of a global batch."""
        columns = [*by_goal(logits), *by_goal(batch.label), batch.weight]
        if self._unseen_rows:
            columns.append(_have_unseen_ids(batch, self._unseen_rows))
        if batch.true_probability is not None:
            columns += by_goal(batch.true_probability)
        self._floats.append(torch.stack(columns).cpu())
        if self._settings.group_by:
            ids = batch.sparse[self._settings.group_by].values().cpu()
            # Padding gets group 0.
            groups = torch.zeros(1, len(logits), dtype=torch.int64)
            groups[0, : len(ids)] = ids
            self._groups.append(groups)
        self._samples.append(batch.global_samples)
        if sum(self._samples) >= _TOGETHER:
            self._send()

    def metrics(self, calibrates: bool = False) -> dict[str, Any]:
        """The metrics of all samples, see `PartMetrics.result`, and `logit_calibration`."""

        def result() -> dict[str, Any]:
            found = []
            further = {}
            if calibrates:
                adds_up = self._settings.calibrate is True
                further["logit_calibration"] = [
                    list(of_all.calibration(adds_up)) for of_all in self._metrics
                ]
            for of_all, of_new in zip(self._metrics, self._metrics_of_new_ids, strict=True):
                found.append(of_all.result())
                if of_new.samples:
                    apart = of_new.result()
                    found[-1] |= {NEW_IDS + n: v for n, v in apart.items() if n != "attainable_auc"}
            if not self._goals:
                return found[0] | further
            return over_goals(dict(zip(self._goals, found, strict=True)), self._goals) | further

        if self._samples:
            self._send()
        return self._on_main(result)

    def _send(self) -> None:
        floats = self._gathered(self._floats)
        groups = self._gathered(self._groups) if self._groups else None

        def take() -> None:
            count = len(self._metrics)
            logits, labels = floats[:count], floats[count : 2 * count]
            weights, *truth = floats[2 * count :]
            with_new = truth.pop(0) > 0 if self._unseen_rows else None
            of_group = None if groups is None else groups[0]
            for goal in range(count):
                given = [logits[goal], labels[goal], weights, of_group, *truth[goal : goal + 1]]
                of_new = with_new
                if self._goals:
                    known = ~np.isnan(labels[goal])
                    given = [None if one is None else one[known] for one in given]
                    of_new = None if with_new is None else with_new[known]
                if of_new is not None:
                    self._metrics_of_new_ids[goal].add(*(one[of_new] for one in given[:3]))
                self._metrics[goal].add(*given)

        self._on_main(take)
        self._floats, self._groups, self._samples = [], [], []

    def _gathered(self, local: list[Tensor]) -> np.ndarray | None:
        """`[columns, n]` of some batches of all ranks in the part's order, on rank 0 only."""
        received = self._processes.gather(torch.cat(local, 1))
        if received is None:
            return None
        sizes = [piece.shape[1] for piece in local]
        batches = zip(*(of_rank.split(sizes, 1) for of_rank in received), strict=True)
        # Padding is at the end of the last ranks' parts of each global batch.
        whole = zip(map(partial(torch.cat, dim=1), batches), self._samples, strict=True)
        return torch.cat([batch[:, :samples] for batch, samples in whole], 1).numpy()

    def _on_main(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0; all ranks fail together."""

        def run() -> Any:
            try:
                return action()
            except MemoryError as failure:
                each = 60 if self._settings.group_by else 20
                raise TrainingStoppedError(
                    f"rank 0 has no memory for the scores of {self._rows:,} samples, some {each} "
                    f"bytes each ({failure or 'out of memory'}); evaluate fewer rows or give the "
                    "process more memory, and continue with checkpoint.resume=auto"
                ) from None

        return self._processes.on_main(run)


def _have_unseen_ids(batch: Batch, unseen_rows: Mapping[str, int]) -> Tensor:
    """`[n]` float32: whether each sample of a batch has an unseen id."""
    found = torch.zeros(len(batch.label), device=batch.label.device)
    for name, row in unseen_rows.items():
        ids = batch.sparse[name]
        samples = torch.repeat_interleave(ids.lengths())
        found.index_fill_(0, samples[ids.values() == row].long(), 1.0)
    return found


def evaluate_run(
    run: TrainingRun, reader: Reader, on_batch: Callable[[int], None]
) -> dict[str, dict[str, Any]]:
    """Evaluate the validation and the test part, log the results, reduce rates if due.

    Tables must be up to date. An interrupted evaluation changes only the log, see
    `Progress.metrics_lines`.
    """
    progress, settings = run.progress, run.config.evaluate
    try:
        results = _evaluate_parts(run, reader, on_batch)
    except BaseException:
        # An interrupted evaluation is repeated.
        run.job.ctr_model.calibration.set(progress.calibration)
        raise
    if is_calibrated(run.config) and "validation" in results:
        progress.calibration = results["validation"]["logit_calibration"]
    progress.last = results
    progress.evaluated_step = progress.step
    progress.metrics_lines = run.folder.metrics_lines
    # Periods have no validation part.
    score = selection_score(results.get(settings.select_on, results["test"]), settings.metric)
    lines = reduce_rates(progress, run.config, score)
    if lines and run.processes.is_main:
        tqdm.write("\n".join(lines))
    return results


def _evaluate_parts(
    run: TrainingRun, reader: Reader, on_batch: Callable[[int], None]
) -> dict[str, dict[str, Any]]:
    """Evaluate and log; the scores of the validation part calibrate the model first."""
    progress, settings = run.progress, run.config.evaluate
    unseen = run.dataset.unseen_rows if run.dataset.period else None
    goals = goal_weights(run.config, run.dataset.goals)
    results = {}
    for name in PARTS:
        part = getattr(reader.dataset, name)
        if part is None:
            continue
        batches = reader.evaluation(part)
        given = run.job.model, batches, run.processes, settings, on_batch, unseen, goals
        if name == "validation" and is_calibrated(run.config):
            calibration = run.job.ctr_model.calibration
            calibration.set([])
            result = evaluate(*given, calibrates=True)
            found = result["logit_calibration"]
            calibration.set(found)
            if any(one != [1.0, 0.0] for one in found):
                result = {**evaluate(*given), "logit_calibration": found}
        else:
            result = evaluate(*given)
        results[name] = result
        line = {"kind": "evaluation", "part": name, "step": progress.step}
        line |= {"train_seconds": progress.train_seconds, **result}
        # The line is valid once all parts are evaluated.
        run.processes.on_main(lambda line=line: run.folder.log(line))
        if not math.isfinite(result["logloss"]):
            raise DivergedError(
                f"the logloss of the {name} part is {result['logloss']} after step {progress.step}",
                progress.step,
            )
    return results
