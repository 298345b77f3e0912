"""Evaluation of a part over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stampede.data import GlobalBatches
from stampede.engine.metrics import auc, logloss
from stampede.engine.processes import Processes


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one part.

    Attributes:
        auc: exact area under the ROC curve; None where one class is absent.
        logloss: mean binary cross-entropy.
        attainable_auc: AUC of the true probabilities, where the data know them.
        samples: number of samples.
    """

    auc: float | None
    logloss: float
    attainable_auc: float | None
    samples: int


@torch.no_grad()
def evaluate(model: nn.Module, batches: GlobalBatches, processes: Processes) -> Evaluation:
    """Score every sample once and compute the metrics; the same result on every rank."""
    model.eval()
    columns: list[Tensor] = []
    for batch in batches.epoch(0):
        on_device = batch.to(processes.device)
        logits = model(on_device.sparse, on_device.dense).float().cpu()
        truth = batch.true_probability
        columns.append(
            torch.stack([batch.weight, batch.label, logits, logits if truth is None else truth])
        )
    model.train()
    weight, label, logits, truth = _gather(torch.cat(columns, 1), processes.world_size)
    real = weight > 0
    label, logits, truth = label[real], logits[real], truth[real]
    return Evaluation(
        auc=_defined(auc(logits, label)),
        logloss=logloss(logits, label),
        attainable_auc=None if batch.true_probability is None else _defined(auc(truth, label)),
        samples=len(label),
    )


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


def _gather(local: Tensor, world_size: int) -> np.ndarray:
    """`[rows, n]` of every rank, all of one size, joined to `[rows, n * world_size]`."""
    parts = [torch.empty_like(local) for _ in range(world_size)]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts, 1).numpy()
