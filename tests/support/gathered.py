"""Tables of a model in training."""

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from stampede.engine.checkpoint.manifest import weights_name
from stampede.engine.tables import FieldWeights
from stampede.models import StoredColumns


def gather_field(model, field, dim, processes):
    """A field's weights on rank 0's CPU, None elsewhere; all ranks must call it."""
    stored = model.state_dict()[weights_name(field)]
    if isinstance(stored, ShardedTensor):
        whole = torch.empty(stored.size(), dtype=stored.dtype) if processes.is_main else None
        stored.gather(dst=0, out=whole)
    else:
        # Data-parallel: every rank holds the whole table.
        whole = stored.detach().clone() if processes.is_main else None
    if whole is None:
        return None
    embedding, first_order = StoredColumns(dim).split(whole)
    return FieldWeights(embedding, first_order * model.module.first_order_scale)
