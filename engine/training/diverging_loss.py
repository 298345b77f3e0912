"""What ends a run whose loss is NaN or infinite, or skips the batch."""

from __future__ import annotations

import math

from torch import Tensor

from stampede.engine.errors import DivergedError
from stampede.engine.job import Job
from stampede.engine.training.progress import Progress

# After this many non-finite losses in a row, single batches are not the cause.
_MOST_SKIPPED = 10


def leaves_out(loss: Tensor, step: int, job: Job) -> bool:
    """Whether a step leaves out its batch, as its loss is not finite, and changes no weights.

    If updates are queued on a GPU, it marks their flag instead, which is read some steps later.

    Raises:
        DivergedError: the loss is not finite, and such batches end the run.
    """
    flag = job.table_update.flag if job.table_update else None
    if flag is not None and not job.skips_nonfinite:
        flag.mark(loss)
        return False
    if math.isfinite(loss) or job.skips_nonfinite:
        return not math.isfinite(loss)
    raise DivergedError(f"the loss is {loss} at step {step}; this step changed no weights", step)


def count_if_skipped(loss: Tensor, progress: Progress) -> bool:
    """Count the newest batch as skipped if its loss is not finite; return whether it is."""
    if math.isfinite(loss):
        progress.skipped_in_a_row = 0
        return False
    progress.skipped_batches += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row >= _MOST_SKIPPED:
        raise DivergedError(
            f"the losses of {_MOST_SKIPPED} steps in a row, up to step {progress.step}, are not "
            "finite; none of these steps changed the weights",
            progress.step,
        )
    return True
