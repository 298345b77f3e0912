"""Averages the weights of an epoch: `train.averaging`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stampede.engine.checkpoint.tensors import local_parts, on_cpu
from stampede.engine.job import Job


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

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Take the weights after a step of the epoch, from 1, into the mean; all ranks call it.

        Brings all rows of the tables up to date if the step is one of those that are averaged.
        """
        number = self._number_at.get(step)
        if number is None:
            return
        weights = self._job.model.state_dict()
        if number == 1:
            self._job.mean = on_cpu(weights, copy=True)
            return
        pairs = list(zip(_floats(self._job.mean), _floats(weights), strict=True))
        for mean, value in pairs:
            mean.lerp_(value.cpu(), 1 / number)
        if step == self._last:
            for mean, value in pairs:
                value.copy_(mean)
            self._job.mean = None


def _floats(weights: Mapping[str, Any]) -> Iterator[Tensor]:
    """This rank's parts of floating-point weights."""
    for values in weights.values():
        yield from (part for part, _ in local_parts(values) if part.is_floating_point())
