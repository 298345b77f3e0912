"""Learning rates of a step."""

from __future__ import annotations

from typing import NamedTuple

from stampede.engine.config import Config
from stampede.engine.job import Job
from stampede.optim import Hyperparameters, learning_rate


class LearningRates(NamedTuple):
    """The rates of one step.

    Attributes:
        embedding: of the tables.
        dense: of the dense layers.
    """

    embedding: float
    dense: float


def learning_rates(
    config: Config, full: Hyperparameters, step: int, steps_per_epoch: float, total_steps: int
) -> LearningRates:
    """The rates of the step after `step` steps: they depend on nothing else in the run.

    Args:
        config: has the schedules.
        full: has the rates that the schedules are fractions of, at the configured batch size.
        step, steps_per_epoch, total_steps: see `stampede.optim.learning_rate`.
    """
    embedding = config.optim.embedding.schedule.as_schedule()
    dense = config.optim.dense.schedule.as_schedule()
    where = step, steps_per_epoch, total_steps
    return LearningRates(
        learning_rate(embedding, full.embedding_lr, *where),
        learning_rate(dense, full.dense_lr, *where),
    )


def set_learning_rates(job: Job, rates: LearningRates) -> None:
    """Give both optimizers their rates for the next step."""
    for group in job.dense_optimizer.param_groups:
        group["lr"] = rates.dense
    for group in job.model.fused_optimizer.param_groups:
        group["lr"] = rates.embedding
    # For fused tables step() only hands the rate on; their update runs in backward.
    job.model.fused_optimizer.step()
