"""The state of torch's random generator of the CPU, as a checkpoint has it for each rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stampede.engine.checkpoint.errors import REMEDY, DamagedCheckpointError
from stampede.engine.checkpoint.together import FailedSomewhereError, together


def set_random_state(path: Path, state: Tensor) -> None:
    """Go on with a rank's random numbers; all ranks must call it, and fail together.

    Args:
        path: the checkpoint, for the message.
        state: this rank's, uint8, as `torch.get_rng_state` gives it.

    Raises:
        DamagedCheckpointError: on some rank it is not a generator's state.
    """
    try:
        together(lambda: torch.set_rng_state(state), dist.group.WORLD)
    except FailedSomewhereError as failure:
        error = DamagedCheckpointError(
            f"{path}: damaged checkpoint (state of the random generator: {failure}); {REMEDY}"
        )
        error.known_to_all_ranks = True
        raise error from None
