"""Averages the weights of an epoch: `train.averaging`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stampede.engine.checkpoint.tensors import local_parts, on_cpu
from stampede.engine.job import Job
from stampede.optim import local_cowclip_tables


class EpochMean:
    """Puts the mean of an epoch's weights in their place at its end; training goes on from there.

    The weights are tables, dense layers and floating-point buffers, at evenly spaced steps; the
    optimizers' moments stay. Averaging takes out the noise of constant rates, as a falling rate
    does that has to know the end of training (Izmailov et al., arXiv 1803.05407; continuing from
    the mean as in Zhang et al., arXiv 1907.08610). The mean so far is `Job.mean`, on the CPU, which
    a checkpoint holds.

    Args:
        steps: of an epoch.
        snapshots: how many of its steps are averaged; fewer than 2 change nothing.
    """

    def __init__(self, job: Job, steps: int, snapshots: int) -> None:
        self._job, taken = job, min(snapshots, steps)
        # The last step of an epoch is one of them.
        steps_taken = [-(-steps * number // taken) for number in range(1, taken + 1)]
        self._number_at = {step: n for n, step in enumerate(steps_taken, 1)} if taken > 1 else {}
        self._last = steps
        # Of the epoch: parts of the mean, and of the weights. These are plain views, as those of
        # `state_dict` ask at each use whether rows wait, which takes longer than a small table's
        # average.
        self._pairs: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Take the weights after a step of the epoch, from 1, into the mean; all ranks call it.

        Brings all rows of the tables up to date if the step is one of those that are averaged.
        """
        number = self._number_at.get(step)
        if number is None:
            return
        job = self._job
        if number == 1 or not self._pairs:
            # A new epoch, or a run that continues within one.
            weights = job.model.state_dict()
            if number == 1:
                job.mean = on_cpu(weights, copy=True)
            self._pairs = list(zip(_floats(job.mean), _floats(weights), strict=True))
        else:
            if job.table_update is not None:
                job.table_update.check_queued(up_to_now=True)
            for tables in local_cowclip_tables(job.model):
                tables.flush()
        if number == 1:
            return
        for mean, value in self._pairs:
            mean.lerp_(value.cpu(), 1 / number)
        if step == self._last:
            for mean, value in self._pairs:
                value.copy_(mean)
            job.mean, self._pairs = None, []


def _floats(weights: Mapping[str, Any]) -> Iterator[Tensor]:
    """This rank's parts of floating-point weights, as plain tensors."""
    for values in weights.values():
        with torch._C.DisableTorchFunctionSubclass():
            parts = [part for part, _ in local_parts(values)]
        yield from (part for part in parts if part.is_floating_point())
