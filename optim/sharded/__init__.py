"""CowClip inside TorchRec's sharded tables."""

from stampede.optim.sharded.collections import local_cowclip_tables
from stampede.optim.sharded.sharders import cowclip_sharders
from stampede.optim.sharded.tables import CowClipTables
from stampede.optim.sharded.unmatched import explain_unmatched_optimizers

explain_unmatched_optimizers()

__all__ = ["CowClipTables", "cowclip_sharders", "local_cowclip_tables"]
