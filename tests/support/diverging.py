"""Runs that diverge at a chosen step."""

import math
import os
from pathlib import Path

from stampede.engine import trainer
from support.jobs import check_weights, run_small, without_times
from support.stopping import Setting

# 8 steps an epoch, at a dense rate of 5e-4 for a batch of 256.
LONG = ["train.epochs=2", "evaluate.every=3", "optim.dense.schedule.warmup=0"]
SAVED = [*LONG, "checkpoint.every_steps=2"]


def poisoned(patch, at, on_rank=0, value=math.nan):
    """Put a NaN or another value into the batches of some steps.

    What follows from it is the run's own.
    """
    take = trainer.train_step

    def disturbed(job, sent, step, *further):
        if step in at and int(os.environ.get("RANK", "0")) == on_rank:
            sent.batch.dense[0, 0] = value
        return take(job, sent, step, *further)

    patch.setattr(trainer, "train_step", disturbed)


def run_poisoned_on_rank_1(folder: Path, overrides: list[str], world_size: int, at):
    """A run of several ranks, in whose last one's batches the NaN is."""
    poisoned(Setting, at, on_rank=1)
    run_small(folder, overrides, world_size)


def after_step(patch, at, action):
    """Do something with the job when a step has been taken."""
    take = trainer.train_step

    def disturbed(job, sent, step, *further):
        loss = take(job, sent, step, *further)
        if step == at:
            action(job)
        return loss

    patch.setattr(trainer, "train_step", disturbed)


def broken(patch, at):
    """Let a step leave an infinite weight."""
    after_step(patch, at, lambda job: [*job.dense_parameters.values()][-1].data.fill_(math.inf))


def same_run(one, other):
    """Whether two runs logged the same, but for why they stopped, and end with the same bits."""
    logged = [
        [line for line in without_times(run) if line["kind"] != "stopped"] for run in (one, other)
    ]
    assert logged[0] == logged[1]
    check_weights(one, other)
