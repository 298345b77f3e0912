"""All kinds of faults that the soak injects."""

from support.soak.faults import (  # noqa: F401
    checkpoints,
    configuration,
    prepared_data,
    processes,
    storage,
    surroundings,
)
from support.soak.faults.kind import KINDS

__all__ = ["KINDS"]
