"""Learning rates of a step."""

from __future__ import annotations

from stampede.engine.build import Job
from stampede.optim import linear_warmup


def set_learning_rates(job: Job, step: int, warmup_steps: int) -> None:
    """Set both optimizers' rates for the step after `step` steps.

    The dense layers are warmed up linearly; the tables' rate is constant.
    """
    dense_lr = linear_warmup(step, warmup_steps, job.actual.dense_lr)
    for group in job.dense_optimizer.param_groups:
        group["lr"] = dense_lr
    for group in job.model.fused_optimizer.param_groups:
        group["lr"] = job.actual.embedding_lr
    # For fused tables step() only hands the rate on; their update runs in backward.
    job.model.fused_optimizer.step()
