"""Whole tables and states of sharded models, on rank 0."""

import torch
import torch.distributed as dist


def tables_of(model, case):
    """Whole tables by name; on rank 0 only, None elsewhere."""
    return gathered(
        {
            key.split(".")[-2]: value
            for key, value in model.state_dict().items()
            if key.endswith(".weight")
        }
    )


def states_of(states, case):
    """Whole states by table and name; on rank 0 only."""
    # A rank without a part of a table has no entry for its state and must be asked nonetheless.
    entries = {
        (key.split(".")[-2], name.split(".", 1)[1]): value
        for key, of_table in states.items()
        for name, value in of_table.items()
    }
    everywhere = [None] * dist.get_world_size()
    local = {}
    for (table, name), value in entries.items():
        if hasattr(value, "local_shards"):
            shards = [(s.metadata.shard_offsets, s.tensor.clone()) for s in value.local_shards()]
        else:
            shards = [([0] * value.ndim, value.clone())]
        size = value.size() if hasattr(value, "size") else ()
        local[table, name] = (tuple(size), shards)
    dist.all_gather_object(everywhere, local)
    whole = {}
    for of_rank in everywhere:
        for (table, name), (size, shards) in of_rank.items():
            target = whole.setdefault(table, {}).setdefault(
                name, torch.full(size, float("nan"), dtype=torch.float64)
            )
            for offsets, values in shards:
                where = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
                target[where] = values.double()
    return whole


def gathered(values):
    whole = {}
    for name, value in values.items():
        if not hasattr(value, "gather") or not hasattr(value, "local_shards"):
            whole[name] = value.detach().clone()
            continue
        out = None
        if dist.get_rank() == 0:
            out = torch.empty(value.size(), dtype=value.dtype)
        value.gather(dst=0, out=out)
        whole[name] = out
    return whole
