"""CowClip for embedding tables, in TorchRec's sharded tables and in plain PyTorch."""

import sys
from importlib import import_module
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
    from stampede.optim.sharded.backward_update import BackwardUpdate
    from stampede.optim.sharded.collections import local_cowclip_tables, table_update
    from stampede.optim.sharded.sharders import cowclip_sharders
    from stampede.optim.sharded.tables import CowClipTables

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

# What needs TorchRec is imported when it is asked for: plain PyTorch does without.
_NEED_TORCHREC = {
    "BackwardUpdate": "backward_update",
    "CowClipTables": "tables",
    "cowclip_sharders": "sharders",
    "local_cowclip_tables": "collections",
    "table_update": "collections",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCHREC:
        return getattr(import_module(f"stampede.optim.sharded.{_NEED_TORCHREC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
