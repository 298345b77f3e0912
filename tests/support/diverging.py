"""Runs that diverge at a chosen step, as those with too high a rate of the dense layers do."""

import os
from pathlib import Path

from stampede.engine import trainer
from support.jobs import run_small


def poisoned(patch, at, above=0.0, on_rank=0):
    """Put a NaN into the batches of some steps, as long as the dense layers' rate is above a bound.

    What follows from it is the run's own.
    """
    take = trainer.train_step

    def disturbed(job, sent, step, *further):
        rate = job.dense_optimizer.param_groups[0]["lr"]
        if step in at and rate > above and int(os.environ.get("RANK", "0")) == on_rank:
            sent.batch.dense[0, 0] = float("nan")
        return take(job, sent, step, *further)

    patch.setattr(trainer, "train_step", disturbed)


class _Patch:
    """Of a process that ends soon."""

    setattr = staticmethod(setattr)


def run_poisoned_on_rank_1(folder: Path, overrides: list[str], world_size: int, at, above):
    """A run of several ranks, in whose last one's batches the NaN is."""
    poisoned(_Patch, at, above, on_rank=1)
    run_small(folder, overrides, world_size)
