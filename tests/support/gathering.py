"""Whole tables and states of sharded models, on rank 0."""

from collections import defaultdict
from itertools import chain

import torch
import torch.distributed as dist

from stampede.engine.checkpoint.manifest import weights_name
from stampede.engine.tables import FieldWeights
from stampede.models import StoredColumns


def whole_tables(model):
    """Tables by path on rank 0, None elsewhere; all ranks must call it."""
    kinds = (".embedding_bags.", ".embeddings.")
    state = model.state_dict().items()
    return gathered({path: t for path, t in state if any(kind in path for kind in kinds)})


def tables_of(model):
    """The same by name."""
    return {path.split(".")[-2]: whole for path, whole in whole_tables(model).items()}


def states_of(model):
    """Whole states of the tables' optimizers by table and name, in float64; on every rank."""
    local = []
    for path, of_table in model.fused_optimizer.state_dict()["state"].items():
        for name, value in of_table.items():
            shards = [([0] * value.ndim, value)]
            if hasattr(value, "local_shards"):
                shards = [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards()]
            shards = [(offsets, tensor.clone()) for offsets, tensor in shards]
            local.append((path.split(".")[-2], name.split(".", 1)[1], value.size(), shards))
    # A rank without a part of a table has no entry for its state.
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, local)
    whole = defaultdict(dict)
    for table, name, size, shards in chain(*everywhere):
        target = whole[table].setdefault(name, torch.full(size, torch.nan, dtype=torch.float64))
        for offsets, values in shards:
            where = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            target[where] = values.double()
    return dict(whole)


def gather_field(model, field, dim, processes):
    """A field's weights on rank 0's CPU, None elsewhere; all ranks must call it."""
    state = model.state_dict()
    name = weights_name(field, state)
    whole = gathered({name: state[name]})[name]
    if not processes.is_main:
        return None
    embedding, first_order = StoredColumns(dim).split(whole)
    return FieldWeights(embedding, first_order * model.module.first_order_scale)


def gathered(values):
    """Sharded tensors whole on rank 0, None elsewhere; copies of the others, which are whole."""
    whole = {}
    for name, value in values.items():
        if not hasattr(value, "local_shards"):
            whole[name] = value.detach().clone()
            continue
        whole[name] = None
        if dist.get_rank() == 0:
            device = next((shard.tensor.device for shard in value.local_shards()), None)
            whole[name] = torch.empty(value.size(), dtype=value.dtype, device=device)
        value.gather(dst=0, out=whole[name])
    return whole
