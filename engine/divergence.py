"""Training that diverges: what is told of its losses."""

from __future__ import annotations

import math
import statistics

from torch import Tensor

from stampede.engine.checkpoint import Progress
from stampede.engine.config import DivergenceSection
from stampede.engine.errors import DivergedError
from stampede.engine.job import Job

# Batches in a row that are left out for their loss: it is no longer the batches' fault.
_MOST_SKIPPED = 10


def count_if_skipped(loss: Tensor, progress: Progress, job: Job) -> bool:
    """Count the batch of the newest step where it was left out; whether it was.

    Args:
        loss: of the step; a job that skips no batches does not wait for it.

    Raises:
        DivergedError: so were too many before it.
    """
    if not job.skips_nonfinite or math.isfinite(loss):
        progress.skipped_in_a_row = 0
        return False
    progress.skipped_batches += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row >= _MOST_SKIPPED:
        raise DivergedError(
            f"the losses of {_MOST_SKIPPED} steps in a row, up to step {progress.step}, are not "
            "finite; the weights are as before the first of them",
            progress.step,
        )
    return True


def check_logged_loss(loss: float, progress: Progress, settings: DivergenceSection) -> None:
    """Compare a loss that was logged with those logged before it, and note it.

    Args:
        loss: of the newest step, read from the device already.

    Raises:
        DivergedError: it is too high.
    """
    check_loss(loss, progress, settings)
    if settings.loss_factor and math.isfinite(loss):
        progress.logged_losses = [*progress.logged_losses, loss][-settings.window :]


def check_loss(loss: Tensor | float, progress: Progress, settings: DivergenceSection) -> None:
    """Compare a loss with those logged before it.

    All ranks have the same losses, so they decide alike.

    Args:
        loss: of the newest step; only where losses are compared is it waited for.

    Raises:
        DivergedError: it is too high.
    """
    # One that is not finite is found by the step itself.
    if not settings.loss_factor or not math.isfinite(loss):
        return
    before = progress.logged_losses[-settings.window :]
    if len(before) == settings.window:
        usual = statistics.median(before)
        # Batches without any weight have a loss of 0, which no other can be compared with.
        if usual and loss > settings.loss_factor * usual:
            raise DivergedError(
                f"the loss {loss:.4g} of step {progress.step} is more than {settings.loss_factor:g}"
                f" times {usual:.4g}, the median of the {settings.window} losses logged before it "
                "(train.on_divergence.loss_factor)",
                progress.step,
            )
