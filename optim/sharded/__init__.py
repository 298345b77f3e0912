"""CowClip inside TorchRec's sharded tables."""

from stampede.optim.sharded.backward_update import BackwardUpdate
from stampede.optim.sharded.collections import local_cowclip_tables, table_update
from stampede.optim.sharded.sharders import cowclip_sharders
from stampede.optim.sharded.tables import CowClipTables

__all__ = [
    "BackwardUpdate",
    "CowClipTables",
    "cowclip_sharders",
    "local_cowclip_tables",
    "table_update",
]
