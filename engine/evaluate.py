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
    """Metrics of one part, weighted where its samples have weights.

    Attributes:
        auc: exact area under the ROC curve; None where one class is absent.
        logloss: mean binary cross-entropy.
        attainable_auc: AUC of the true probabilities, where the data know them.
        samples: number of samples, those of weight 0 among them.
    """

    auc: float | None
    logloss: float
    attainable_auc: float | None
    samples: int


@torch.no_grad()
def evaluate(model: nn.Module, batches: GlobalBatches, processes: Processes) -> Evaluation:
    """Score every sample once and compute the metrics; the same result on every rank.

    Some sample must have a weight above 0.
    """
    model.eval()
    columns: list[Tensor] = []
    for batch in batches.epoch(0):
        batch = batch.to(processes.device, non_blocking=True)
        logits = model(batch.sparse, batch.dense).float()
        truth = batch.true_probability
        # A sample may have weight 0 as padding has.
        real = torch.arange(len(logits), device=logits.device) < batch.samples
        columns.append(
            torch.stack(
                [
                    real.float(),
                    batch.label,
                    batch.weight,
                    logits,
                    logits if truth is None else truth,
                ]
            ).cpu()
        )
    model.train()
    gathered = _gather(torch.cat(columns, 1), processes.world_size)
    label, weight, logits, truth = gathered[1:, gathered[0] > 0]
    # Without weights pairs are counted in integers.
    weights = None if (weight == 1).all() else weight
    attainable = None
    if batch.true_probability is not None:
        attainable = _defined(auc(truth, label, weights))
    return Evaluation(
        auc=_defined(auc(logits, label, weights)),
        logloss=logloss(logits, label, weights),
        attainable_auc=attainable,
        samples=len(label),
    )


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


def _gather(local: Tensor, world_size: int) -> np.ndarray:
    """`[rows, n]` of every rank, all of one size, joined to `[rows, n * world_size]`."""
    parts = [torch.empty_like(local) for _ in range(world_size)]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts, 1).numpy()
