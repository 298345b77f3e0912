"""One training step."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from stampede.data import Batch
from stampede.engine.build import Job
from stampede.engine.dense_gradients import average_gradients_
from stampede.engine.errors import TrainingStoppedError
from stampede.engine.processes import Processes
from stampede.optim import NonFiniteGradientError

WHAT_TO_TRY = (
    "Try a lower optim.dense.lr or optim.embedding.lr, or a longer warm-up "
    "(optim.dense.schedule.warmup, optim.embedding.schedule.warmup); "
    "with checkpoint.resume=auto the run goes on from its newest checkpoint"
)


# Samples of a batch that pass through the dense layers at a time on a CPU. What the layers keep for
# backward stays in cache, and memory that is freed after each tile is there for the next one.
TILE_ROWS = 2048


def train_step(job: Job, batch: Batch, step: int, processes: Processes) -> float:
    """Forward, backward with the update of the tables, update of the dense layers.

    Args:
        batch: this rank's part of the global batch.
        step: number of this step, counted from 1.

    Returns:
        Mean loss over the global batch, weighted where samples have weights, the same on every
        rank; 0 where all weights are.

    Raises:
        TrainingStoppedError: the loss is not finite; nothing was updated in this step.
    """
    # From page-locked memory this only queues the copy; the device makes it before the forward.
    batch = batch.to(processes.device, non_blocking=True)
    rows = job.front.lookup(batch.sparse)
    local, grad = _dense_pass(job, batch, rows.detach(), processes)
    dist.all_reduce(local)
    loss = local.item()
    if not math.isfinite(loss):
        raise TrainingStoppedError(
            f"the loss is {loss} at step {step}; the weights are as before this step. {WHAT_TO_TRY}"
        )
    _update_tables(rows, grad, step)
    if job.passes == 2:
        _second_pass(job, batch, step, processes)
    average_gradients_(job.dense_parameters.values(), processes.world_size)
    job.dense_optimizer.step()
    return loss


def _dense_pass(
    job: Job, batch: Batch, rows: Tensor, processes: Processes
) -> tuple[Tensor, Tensor]:
    """Forward and backward of the dense layers, whose gradients are left in the parameters.

    Args:
        rows: looked-up rows, see `EmbeddingFront.lookup`.

    Returns:
        This rank's share of the weighted mean loss over the global batch, float64 scalar, and the
        gradient of the rows. Gradients are still to be averaged over the ranks: they are those of
        the share times the number of ranks, which makes their mean that of the whole loss,
        whatever the padding.
    """
    job.dense_optimizer.zero_grad(set_to_none=True)
    weight = _sample_weights(batch)
    grad = torch.empty_like(rows)
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    size = TILE_ROWS if rows.device.type == "cpu" else max(len(rows), 1)
    with job.precision.autocast(rows.device):
        for first in range(0, len(rows), size):
            tile = slice(first, first + size)
            part = rows[tile].requires_grad_()
            logits = job.ctr_model.logits(part, batch.dense[tile]).float()
            losses = functional.binary_cross_entropy_with_logits(
                logits, batch.label[tile], reduction="none"
            )
            loss = (losses * weight[tile]).sum()
            (loss * processes.world_size).backward()
            grad[tile] = part.grad
            total += loss.detach()
    return total, grad


def _sample_weights(batch: Batch) -> Tensor:
    """What each sample's loss counts for in the weighted mean over the global batch, `[n]`."""
    # Weights are brought to a mean of 1 first, as a loss times a very large or a very small one is
    # no float32. A batch without any weight teaches nothing: its loss is 0.
    scale = batch.global_samples / (batch.global_weight or 1.0)
    return (batch.weight.double() * scale).float() / batch.global_samples


def _update_tables(rows: Tensor, grad: Tensor, step: int) -> None:
    """Backward through the lookup, which updates the tables."""
    try:
        rows.backward(grad)
    except NonFiniteGradientError as failure:
        raise TrainingStoppedError(f"step {step}: {failure}. {WHAT_TO_TRY}") from None


def _second_pass(job: Job, batch: Batch, step: int, processes: Processes) -> None:
    """Helen's second pass, at the moved rows; the dense layers keep the first one's gradient."""
    parameters = list(job.dense_parameters.values())
    first = [parameter.grad for parameter in parameters]
    rows = job.front.lookup(batch.sparse)
    _, grad = _dense_pass(job, batch, rows.detach(), processes)
    _update_tables(rows, grad, step)
    for parameter, kept in zip(parameters, first, strict=True):
        parameter.grad = kept
