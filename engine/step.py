"""One training step."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from stampede.data import Batch
from stampede.engine.build import Job
from stampede.engine.errors import TrainingStoppedError
from stampede.engine.processes import Processes
from stampede.optim import NonFiniteGradientError

WHAT_TO_TRY = (
    "Try a lower optim.dense.lr or optim.embedding.lr, or a longer warm-up "
    "(optim.dense.schedule.warmup, optim.embedding.schedule.warmup); "
    "with checkpoint.resume=auto the run goes on from its newest checkpoint"
)


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
    total = _local_loss(job, batch)
    mean = total.detach().clone()
    dist.all_reduce(mean)
    loss = mean.item()
    if not math.isfinite(loss):
        raise TrainingStoppedError(
            f"the loss is {loss} at step {step}; the weights are as before this step. {WHAT_TO_TRY}"
        )
    job.dense_optimizer.zero_grad(set_to_none=True)
    _backward(total, step, processes)
    if job.passes == 2:
        _second_pass(job, batch, step, processes)
    job.dense_optimizer.step()
    return loss


def _local_loss(job: Job, batch: Batch) -> Tensor:
    """This rank's share of the weighted mean loss over the global batch."""
    logits = job.model(batch.sparse, batch.dense)
    losses = functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="none")
    # Weights are brought to a mean of 1 first, as a loss times a very large or a very small one is
    # no float32. A batch without any weight teaches nothing: its loss is 0.
    scale = batch.global_samples / (batch.global_weight or 1.0)
    weight = (batch.weight.double() * scale).float()
    return (losses * weight).sum() / batch.global_samples


def _backward(total: Tensor, step: int, processes: Processes) -> None:
    # Gradients are averaged over the ranks; times the ranks, over the true sum of weights, makes
    # that the mean over the global batch whatever the padding.
    try:
        (total * processes.world_size).backward()
    except NonFiniteGradientError as failure:
        raise TrainingStoppedError(f"step {step}: {failure}. {WHAT_TO_TRY}") from None


def _second_pass(job: Job, batch: Batch, step: int, processes: Processes) -> None:
    """Helen's second pass, at the moved rows; the dense layers keep the first one's gradient."""
    parameters = list(job.dense_parameters.values())
    # Copies: the gradients lie in the buckets of DDP, which the second pass fills anew.
    first = [None if p.grad is None else p.grad.clone() for p in parameters]
    job.dense_optimizer.zero_grad(set_to_none=True)
    _backward(_local_loss(job, batch), step, processes)
    for parameter, grad in zip(parameters, first, strict=True):
        parameter.grad = grad
