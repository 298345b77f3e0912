"""Parts in memory, and readers of them."""

from itertools import pairwise

import torch

from stampede.data import GlobalBatches, Order
from stampede.data.prepared.reader import Shard, ShardedPart
from support.prepared import drawn_rows, shard_of

FIELDS = [f"C{i + 1}" for i in range(26)]


def array_part(arrays, cuts=()):
    """A part in memory, in shards that end at the cuts."""
    edges = [0, *cuts, len(arrays["label"])]
    return ShardedPart(
        tuple(
            Shard(
                stop - start,
                {k: torch.from_numpy(a.copy()) for k, a in shard_of(arrays, start, stop).items()},
            )
            for start, stop in pairwise(edges)
        )
    )


def numbered(rows, **more):
    """A part whose rows are told apart by their first number."""
    return array_part(drawn_rows(rows, single=2, **more))


def reader(part, world_size=1, rank=0, batch_size=8, shuffle="global", fields=FIELDS[:2], **more):
    order = Order(part.rows, shuffle, 5, 16 if shuffle == "block" else 0, 4)
    return GlobalBatches(part, fields, batch_size, rank, world_size, order, **more)


def rows_of(batch):
    return batch.dense[: batch.samples, 0].long().tolist()


def global_batches(part, world_size, epoch=0, **more):
    """Sorted rows of each global batch, padding left out."""
    ranks = [
        list(reader(part, world_size, rank, **more).epoch(epoch)) for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    joined = []
    for batches in zip(*ranks, strict=True):
        assert len({len(batch.label) for batch in batches}) == 1
        rows = [row for batch in batches for row in rows_of(batch)]
        assert {batch.global_samples for batch in batches} == {len(rows)}
        joined.append(sorted(rows))
    return joined
