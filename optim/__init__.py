"""CowClip for embedding tables, in TorchRec's sharded tables and in plain PyTorch."""

import sys
from typing import TYPE_CHECKING, Any

from stampede.optim.clip import CowClip
from stampede.optim.dense_adam import DenseAdam
from stampede.optim.helen import Helen
from stampede.optim.nonfinite import NonFiniteGradientError
from stampede.optim.optimizers import (
    CowClipAdagrad,
    CowClipAdam,
    CowClipRowWiseAdagrad,
    CowClipRowWiseAdam,
    CowClipSGD,
)
from stampede.optim.scaling import Hyperparameters, Scaled, ScalingRule, scale
from stampede.optim.schedules import Schedule, learning_rate
from stampede.optim.table_init import TableInit

if TYPE_CHECKING or sys.modules.get("torchrec"):
    from stampede.optim.sharded import (
        BackwardUpdate,
        CowClipTables,
        cowclip_sharders,
        local_cowclip_tables,
        table_update,
    )

__all__ = [
    "BackwardUpdate",
    "CowClip",
    "CowClipAdagrad",
    "CowClipAdam",
    "CowClipRowWiseAdagrad",
    "CowClipRowWiseAdam",
    "CowClipSGD",
    "CowClipTables",
    "DenseAdam",
    "Helen",
    "Hyperparameters",
    "NonFiniteGradientError",
    "Scaled",
    "ScalingRule",
    "Schedule",
    "TableInit",
    "cowclip_sharders",
    "learning_rate",
    "local_cowclip_tables",
    "scale",
    "table_update",
]

_NEED_TORCHREC = (
    "BackwardUpdate",
    "CowClipTables",
    "cowclip_sharders",
    "local_cowclip_tables",
    "table_update",
)


def __getattr__(name: str) -> Any:
    """What needs TorchRec is imported when it is asked for: plain PyTorch does without."""
    if name in _NEED_TORCHREC:
        from stampede.optim import sharded

        return getattr(sharded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
