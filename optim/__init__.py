"""CowClip for embedding tables, in TorchRec's sharded tables and in plain PyTorch."""

from stampede.optim.clip import CowClip
from stampede.optim.cowclip_adam import CowClipAdam
from stampede.optim.dense_adam import DenseAdam
from stampede.optim.fused_tables import CowClipTables
from stampede.optim.scaling import Hyperparameters, ScalingRule, scale
from stampede.optim.sharders import cowclip_sharders, local_cowclip_tables
from stampede.optim.table_init import TableInit
from stampede.optim.warmup import linear_warmup

__all__ = [
    "CowClip",
    "CowClipAdam",
    "CowClipTables",
    "DenseAdam",
    "Hyperparameters",
    "ScalingRule",
    "TableInit",
    "cowclip_sharders",
    "linear_warmup",
    "local_cowclip_tables",
    "scale",
]
