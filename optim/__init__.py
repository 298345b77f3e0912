"""CowClip for embedding tables, in TorchRec's sharded tables and in plain PyTorch."""

from stampede.optim.clip import CowClip
from stampede.optim.dense_adam import DenseAdam
from stampede.optim.helen import Helen
from stampede.optim.optimizers import (
    CowClipAdagrad,
    CowClipAdam,
    CowClipRowWiseAdagrad,
    CowClipRowWiseAdam,
    CowClipSGD,
)
from stampede.optim.scaling import Hyperparameters, Scaled, ScalingRule, scale
from stampede.optim.schedules import Schedule, learning_rate
from stampede.optim.sharded import CowClipTables, cowclip_sharders, local_cowclip_tables
from stampede.optim.table_init import TableInit
from stampede.optim.update import NonFiniteGradientError

__all__ = [
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
]
