"""Evaluation of a part over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stampede.data import Batch, GlobalBatches
from stampede.engine.config import EvaluateSection
from stampede.engine.console import progress_bar
from stampede.engine.errors import TrainingStoppedError
from stampede.engine.metrics import PartMetrics
from stampede.engine.processes import Processes

T = TypeVar("T")

# Samples of all ranks that are sent to rank 0 at a time, at least.
_TOGETHER = 1 << 17


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one part, weighted where its samples have weights.

    Attributes:
        auc: exact area under the ROC curve; None where one class is absent.
        logloss: mean binary cross-entropy.
        attainable_auc: AUC of the true probabilities, where the data know them.
        samples: number of samples, those of weight 0 among them.
        further: what else `evaluate.metrics` and `evaluate.group_by` ask for, by name.
    """

    auc: float | None
    logloss: float
    attainable_auc: float | None
    samples: int
    further: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All metrics by name."""
        first = {name: value for name, value in vars(self).items() if name != "further"}
        return {**first, **self.further}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: GlobalBatches,
    processes: Processes,
    settings: EvaluateSection | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Evaluation:
    """Score every sample once and compute the metrics; the same result on every rank.

    Scores are brought to rank 0 some batches at a time, which keeps and sorts them: see
    `PartMetrics` for its memory; that of the others does not grow with the part. As rank 0 takes
    the samples in the order of the part, whatever the number of ranks, equal scores give metrics
    that are equal to the last bit.

    Some sample must have a weight above 0.

    Args:
        settings: default: those of the configuration.
        on_batch: called after every batch with its number, counted from 1; may raise on all ranks.

    Raises:
        TrainingStoppedError: rank 0 has no memory for the scores.
    """
    settings = settings or EvaluateSection()
    model.eval()
    shown = processes.is_main
    processes.pulse.beat("evaluating")
    scores = _Scores(processes, settings, batches)
    with progress_bar(len(batches), 0, shown, "evaluating", "batches", delay=5.0) as bar:
        for number, batch in enumerate(batches.epoch(0), 1):
            processes.pulse.beat("evaluating")
            batch = batch.to(processes.device, non_blocking=True)
            scores.add(batch, model(batch.sparse, batch.dense).float())
            bar.update()
            if on_batch is not None:
                on_batch(number)
        # Rank 0 sorts the scores, and the others wait for it.
        with processes.pulse.slowly("computing metrics"):
            found = scores.metrics()
    model.train()
    return Evaluation(
        **{name: found.pop(name) for name in ("auc", "logloss", "attainable_auc", "samples")},
        further=found,
    )


class _Scores:
    """Scores on their way to rank 0; each rank must make the same calls."""

    def __init__(
        self, processes: Processes, settings: EvaluateSection, batches: GlobalBatches
    ) -> None:
        self._processes = processes
        self._settings = settings
        self._rows = batches.rows
        self._unknown_groups = batches.unknown_rows.get(settings.group_by, ())
        self._metrics: PartMetrics | None = None
        # Scores of some batches on this rank, and samples of the global batches they are of.
        self._floats: list[Tensor] = []
        self._groups: list[Tensor] = []
        self._samples: list[int] = []

    def add(self, batch: Batch, logits: Tensor) -> None:
        """Take this rank's part of a global batch."""
        columns = [logits, batch.label, batch.weight]
        if batch.true_probability is not None:
            columns.append(batch.true_probability)
        self._floats.append(torch.stack(columns).cpu())
        if self._settings.group_by:
            ids = batch.sparse[self._settings.group_by].values().cpu()
            # Padding has no id.
            groups = torch.zeros(1, len(logits), dtype=torch.int64)
            groups[0, : len(ids)] = ids
            self._groups.append(groups)
        self._samples.append(batch.global_samples)
        if sum(self._samples) >= _TOGETHER:
            self._send()

    def metrics(self) -> dict[str, Any]:
        """The metrics of all samples, see `PartMetrics.result`."""
        if self._samples:
            self._send()
        return self._on_main(lambda: self._metrics.result())

    def _send(self) -> None:
        floats = self._gathered(self._floats)
        groups = self._gathered(self._groups) if self._groups else None
        self._on_main(partial(self._take, floats, groups))
        self._floats, self._groups, self._samples = [], [], []

    def _gathered(self, local: list[Tensor]) -> np.ndarray | None:
        """`[columns, n]` of some batches from all ranks, on rank 0 only, in the part's order."""
        joined = torch.cat(local, 1)
        world_size = self._processes.world_size
        received = None
        if self._processes.is_main:
            received = [torch.empty_like(joined) for _ in range(world_size)]
        dist.gather(joined, received)
        if received is None:
            return None
        # What pads a global batch stands at the end of the last ranks' parts of it.
        sizes = [piece.shape[1] for piece in local]
        batches = zip(*(of_rank.split(sizes, 1) for of_rank in received), strict=True)
        real = [
            torch.cat(parts, 1)[:, :samples]
            for parts, samples in zip(batches, self._samples, strict=True)
        ]
        return torch.cat(real, 1).numpy()

    def _on_main(self, action: Callable[[], T]) -> T:
        """Run it on rank 0; all ranks fail together."""

        def run() -> T:
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

    def _take(self, floats: np.ndarray, groups: np.ndarray | None) -> None:
        if self._metrics is None:
            self._metrics = PartMetrics(
                self._settings.metrics,
                grouped=groups is not None,
                with_truth=len(floats) > 3,
                samples=self._rows,
                unknown_groups=self._unknown_groups,
            )
        logits, labels, weights, *truth = floats
        self._metrics.add(logits, labels, weights, None if groups is None else groups[0], *truth)
