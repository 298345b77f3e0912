"""Copies of tables on every rank, some with CowClip and some without."""

import torch
from torchrec.optim.optimizers import in_backward_optimizer_filter

from stampede.optim import local_cowclip_tables
from support.bags import PLANS, Bags, jagged, shard, weights_of, with_cowclip
from support.unsharded import process_group

DENSE_LR = 0.5


def ids_of(step, samples):
    """Ids `[samples, 3]`, the same for every feature."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (samples, 3), generator=draw)


def train_mixed(samples, steps):
    """Train table `a` with CowClip and `b` with a dense optimizer, on this rank's samples.

    Returns:
        Weights at the start and at the end, and how many rows were touched.
    """
    with process_group():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        torch.manual_seed(rank)
        model = with_cowclip(Bags(a=8, b=8), only="a")
        model = shard(model, PLANS["copies"])
        weights = model.state_dict()
        for name, scale in (("a", 0.1), ("b", 0.2)):
            draw = torch.Generator().manual_seed(7)
            values = torch.randn(20, 8, generator=draw) * scale
            weights[f"ebc.embedding_bags.{name}.weight"].copy_(values)
        start = weights_of(model)
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        optimizer = torch.optim.SGD(dense.values(), lr=DENSE_LR)
        each = samples // world
        for step in range(steps):
            ids = ids_of(step, samples)[rank * each : (rank + 1) * each]
            optimizer.zero_grad()
            found = model(jagged(["f_a", "f_b"], ids))
            loss = sum(value.square().sum() for value in found.values()) / each
            loss.backward()
            optimizer.step()
        counts = [int(tables.row_counts[0]) for tables in local_cowclip_tables(model)]
        return {
            "start": start,
            "end": weights_of(model),
            "touched": sum(counts),
            "dense": sorted(dense),
        }
