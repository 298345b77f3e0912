"""One training step, and the prefetch of the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from stampede.data import Batch
from stampede.data.samples import aligned
from stampede.engine.errors import DivergedError
from stampede.engine.job import Job
from stampede.engine.job.threads import using_threads
from stampede.engine.processes import Processes
from stampede.engine.training.diverging_loss import leaves_out
from stampede.engine.watching.heartbeat import LOOKING_UP, READING, Heartbeat
from stampede.models import EmbeddingFront
from stampede.models.dropout import sample_keys, seed_of
from stampede.models.embedding_front import LookedUp, SentIds
from stampede.models.histories import tile as tile_of
from stampede.optim import NonFiniteGradientError, local_cowclip_tables

# Samples of a tile that passes through the dense layers on a CPU. Tiles reuse freed memory, which
# is more likely in cache than a whole batch's. `train.reproducible` uses the batch's own tiles.
TILE_ROWS = 8192


class SentBatch(NamedTuple):
    """This rank's part of a global batch on its device, with its ids being sent to their rows.

    `position` is that of the batches after this one; `ready`, on a GPU, when it can be used.
    """

    batch: Batch
    ids: SentIds
    ready: torch.cuda.Event | None = None
    position: Any = None

    def received(self) -> Batch:
        """The batch, for use on the current stream."""
        if self.ready is not None:
            here = torch.cuda.current_stream()
            here.wait_event(self.ready)
            self.batch.record_stream(here)
            self.ids.record_stream(here)
        return self.batch


def send(batch: Batch, front: EmbeddingFront, device: torch.device) -> SentBatch:
    """Copy a batch to the device and send its ids."""
    batch = batch.to(device, non_blocking=True)
    return SentBatch(batch, front.send(batch.sparse))


def prefetch(
    batches: Iterable[Batch],
    front: EmbeddingFront,
    device: torch.device,
    position: Callable[[], Any] | None = None,
    heartbeat: Heartbeat | None = None,
) -> Iterator[SentBatch]:
    """Send the ids of each batch while the previous one is trained on.

    `position` returns that of `batches`, which is one batch ahead of the consumer.
    """
    source, ahead = iter(batches), None
    heartbeat = heartbeat or Heartbeat()
    # On a GPU, use another stream: TorchRec waits for its stream when it sends ids, and this one
    # has no queued steps. Its small launches have priority over the steps.
    aside = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
    while True:
        with nullcontext() if aside is None else torch.cuda.stream(aside):
            heartbeat.beat(READING)
            batch = next(source, None)
            heartbeat.beat("sending ids")
            sent = None
            if batch is not None:
                sent = send(batch, front, device)._replace(
                    ready=aside and aside.record_event(), position=position and position()
                )
            heartbeat.beat("between steps")
        if ahead is not None:
            yield ahead
        if sent is None:
            return
        ahead = sent


def train_step(
    job: Job,
    sent: SentBatch,
    step: int,
    processes: Processes,
) -> Tensor:
    """Forward, backward with the update of the tables, update of the dense layers.

    Args:
        step: its number, counted from 1.

    Returns:
        Mean loss over the global batch, weighted if samples have weights, a float64 scalar on the
        device, the same on every rank. It is 0 if all weights are 0. It is not finite if the job
        skipped the batch for that reason; then nothing was updated.

    Raises:
        DivergedError: a loss or a gradient is not finite; nothing was updated in that step or
            since. If updates are queued on a GPU, it is raised some steps later.
    """
    with using_threads(job.threads or torch.get_num_threads()):
        return _train_step(job, sent, step, processes)


def _train_step(job: Job, sent: SentBatch, step: int, processes: Processes) -> Tensor:
    heartbeat = processes.heartbeat
    heartbeat.beat(LOOKING_UP, step)
    batch = sent.received()
    looked_up = job.front.lookup_sent(sent.ids)
    buffers = job.dense_buffers if job.skips_nonfinite else {}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    heartbeat.beat("computing")
    loss, grads = _dense_pass(job, batch, looked_up, step, processes)
    if processes.world_size > 1:
        heartbeat.beat("adding up the loss")
        loss = sum_over_ranks(loss, processes.world_size, in_order=batch.tiles > 0)
    flag = job.table_update.flag if job.table_update else None
    if leaves_out(loss, step, job):
        for name, buffer in before.items():
            job.dense_buffers[name].copy_(buffer)
        heartbeat.beat("between steps")
        return loss
    heartbeat.beat("updating tables")
    with stopping(step):
        torch.autograd.backward(looked_up.tensors(), grads)
    heartbeat.beat("averaging gradients")
    average_gradients_(
        job.dense_parameters.values(), processes.world_size, in_order=batch.tiles > 0
    )
    heartbeat.beat("updating dense layers")
    job.dense_optimizer.update_(None if flag is None else flag.found_inf())
    heartbeat.beat("between steps")
    return loss


def average_gradients_(
    parameters: Iterable[Tensor], world_size: int, *, in_order: bool = False
) -> None:
    """Replace the gradients by their means over the ranks, in one exchange, in place.

    A missing gradient counts as zeros, since other ranks may have one.
    """
    grads = []
    for parameter in parameters:
        parameter.grad = _grad(parameter)
        grads.append(parameter.grad)
    if world_size == 1 or not grads:
        return
    together = torch.cat([grad.flatten() for grad in grads])
    together = sum_over_ranks(together, world_size, in_order=in_order) / world_size
    for grad, mean in zip(grads, together.split([g.numel() for g in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def sum_over_ranks(values: Tensor, world_size: int, *, in_order: bool) -> Tensor:
    """The sum of the ranks' values, the same on every rank.

    In order, it adds in a binary tree over the ranks, a power of two of them, which continues the
    tree of each rank's tiles (`add_tile`). Otherwise the backend chooses the order.
    """
    if not in_order:
        dist.all_reduce(values)
        return values
    # Each rank adds up its share of the values: no more traffic than `all_reduce`.
    flat = values.flatten()
    flat = functional.pad(flat, (0, -len(flat) % world_size))
    parts = torch.empty_like(flat)
    dist.all_to_all_single(parts, flat)
    parts = parts.view(world_size, -1)
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    dist.all_gather_into_tensor(flat, parts[0])
    return flat[: values.numel()].view_as(values)


def add_tile(sums: list[list[Tensor]], number: int, values: list[Tensor]) -> None:
    """Add the values of a tile, numbered from 1, to sums in a binary tree; overwrites them.

    After a power of two of tiles, one element with the sums over all of them is left: the same bits
    on any number of ranks.
    """
    sums.append(values)
    while number % 2 == 0:
        last = sums.pop()
        torch._foreach_add_(sums[-1], last)
        number //= 2


@contextmanager
def stopping(step: int) -> Iterator[None]:
    """Turn a non-finite gradient, seen in or after `step`, into an error that advises the user."""
    try:
        yield
    except NonFiniteGradientError as failure:
        bad = step - failure.ago
        raise DivergedError(
            f"step {bad}: {failure}; in a configuration, write "
            "optim.embedding.on_nonfinite=skip_row",
            bad,
        ) from None


def flush_tables(job: Job, step: int, device: torch.device) -> None:
    """Bring all rows up to date, and wait until they are; all ranks must call it.

    Raises:
        DivergedError: a step that was queued on a GPU was not finite.
    """
    with stopping(step):
        if job.table_update is not None:
            job.table_update.check_queued(up_to_now=True)
        for tables in local_cowclip_tables(job.model):
            tables.flush()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seed_draws(seed: int, step: int, place: int, device: torch.device) -> None:
    """Seed what a network of the user's draws: a continued run draws the same numbers.

    Dropout does not depend on it, see `sample_keys`. `place` is the number of the samples' tile or
    rank.
    """
    drawn = seed_of(seed, step, place)
    torch.default_generator.manual_seed(drawn)
    # `torch.manual_seed` also seeds unused GPUs, which is far slower.
    if device.type == "cuda":
        torch.cuda.manual_seed(drawn)


def _dense_pass(
    job: Job,
    batch: Batch,
    looked_up: LookedUp,
    step: int,
    processes: Processes,
) -> tuple[Tensor, list[Tensor]]:
    """Forward and backward of the dense layers; leaves gradients in the parameters.

    Returns:
        This rank's share of the weighted mean loss over the global batch, a float64 scalar, and the
        gradients of `looked_up.tensors()`. Gradients are of the share times the number of ranks, so
        their mean over the ranks is the gradient of the whole loss, whatever the padding.
    """
    rows, histories = looked_up.rows.detach(), looked_up.histories
    of_histories = {name: torch.zeros_like(one.values) for name, one in histories.items()}
    parameters = list(job.dense_parameters.values())
    label, weight = batch.label, _sample_weights(batch)
    if job.ctr_model.goal_losses is not None:
        label = label.nan_to_num()
    keys = None
    if job.ctr_model.has_dropout and batch.rows is not None:
        keys = sample_keys(job.seed, step, batch.rows)
    grad, sums = None, []
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    share = torch.full((), float(processes.world_size), device=rows.device)
    tiles = _tiles(job, batch)
    with job.precision.computing(rows.device):
        for number, tile in enumerate(tiles):
            if number == 0 or batch.tiles:
                place = processes.rank * max(batch.tiles, 1) + number
                _seed_draws(job.seed, step, place, rows.device)
                for parameter in parameters:
                    parameter.grad = None
            part, dense = rows[tile], batch.dense[tile]
            if batch.tiles:
                part, dense = aligned(part), aligned(dense)
            of_tile = None if keys is None else keys[tile]
            read = tile_of(histories, tile.start, tile.stop, of_histories)
            logits = job.ctr_model.logits(part.requires_grad_(), dense, of_tile, read).float()
            part_of_batch = 1 / (len(tiles) * processes.world_size)
            given = logits, label[tile], weight[tile]
            loss = _loss_backward(job, batch, given, share, part_of_batch)
            if len(part) == len(rows):
                grad = _grad(part)
            else:
                if grad is None:
                    grad = torch.empty_like(rows)
                    grad[batch.samples :] = 0.0
                grad[tile] = _grad(part)
            if batch.tiles:
                add_tile(sums, number + 1, [loss, *map(_grad, parameters)])
            else:
                total += loss
    if batch.tiles:
        ((total, *found),) = sums
        for parameter, one in zip(parameters, found, strict=True):
            parameter.grad = one
    grad = torch.zeros_like(rows) if grad is None else grad
    return total, [grad, *of_histories.values()]


def _loss_backward(
    job: Job,
    batch: Batch,
    given: tuple[Tensor, Tensor, Tensor],
    share: Tensor,
    part_of_batch: float,
) -> Tensor:
    """Backward of a tile's loss; returns it, a float64 scalar.

    Args:
        given: the tile's logits, labels and weights.
        share: what the loss is multiplied by.
        part_of_batch: share of the tile in the global batch.
    """
    goal_losses = job.ctr_model.goal_losses
    if goal_losses is None:
        loss = functional.binary_cross_entropy_with_logits(*given, reduction="sum")
        loss.backward(share)
    else:
        losses = functional.binary_cross_entropy_with_logits(*given, reduction="none")
        loss, objective = goal_losses(losses.sum(0), batch.global_weight, part_of_batch)
        objective.backward(share)
    return loss.detach().double()


def _tiles(job: Job, batch: Batch) -> list[slice]:
    """This rank's samples, in stretches that pass through the dense layers one by one."""
    if job.ctr_model.batch_norms:
        # In one pass, as statistics are of all samples; even none, as other ranks wait for them.
        # Padding does not count.
        return [slice(0, batch.samples)]
    rows = len(batch.label)
    size = TILE_ROWS if batch.label.device.type == "cpu" else max(rows, 1)
    if batch.tiles:
        size = rows // batch.tiles
    return [slice(first, first + size) for first in range(0, rows, size)]


def _grad(values: Tensor) -> Tensor:
    """The gradient; zeros if the loss does not depend on the values."""
    return torch.zeros_like(values) if values.grad is None else values.grad


def _sample_weights(batch: Batch) -> Tensor:
    """`[n]`: factor of each sample's loss in the weighted mean over the global batch.

    With several goals `[n, goals]`, 0 where a label is missing: the means of the samples that have
    that label.
    """
    # First scale weights to a mean of 1: a loss times an extreme weight would overflow or
    # underflow. A batch whose weights are all 0 has a loss of 0.
    total = batch.global_weight
    # Reading it from a GPU would wait.
    total = torch.where(total == 0, 1.0, total) if isinstance(total, Tensor) else total or 1.0
    scale, weight = batch.global_samples / total, batch.weight.double()
    if batch.label.ndim == 2:
        weight = weight.unsqueeze(1) * ~batch.label.isnan()
    return (weight * scale).float() / batch.global_samples
