"""Batches in which samples share bags, trained with each bag once and with one for each sample."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from support.gathering import tables_of
from support.parity import DEFAULTS, Holder, build_collection, example_loss, shard
from support.ranks import process_group
from support.unsharded import Unsharded

SAMPLES, STEPS = 24, 4


def drawn(case, step):
    """Of the global batch by feature: its few bags, their weights, each sample's bag, targets."""
    draw = torch.Generator().manual_seed(step)
    batch = {}
    for table, spec in zip(case.names, case.tables, strict=True):
        for number, feature in enumerate(case.features[table]):
            # Of each rank's samples, so that the bags of one are not another's.
            bags = [
                (
                    torch.randint(0, spec.rows, (int(length),), generator=draw),
                    torch.rand(int(length), generator=draw) + 0.5,
                )
                for length in torch.randint(0, 4, (4 + number,), generator=draw)
            ]
            of_sample = torch.randint(0, len(bags), (SAMPLES,), generator=draw)
            targets = torch.randn(SAMPLES, spec.dim, generator=draw)
            batch[feature] = bags, of_sample, targets
    return batch


def as_batch(case, batch, samples, *, is_whole):
    """Some samples, with one bag for each, or with the bags that they share."""
    bags = []
    for all_bags, of_sample, _ in batch.values():
        bags.append([all_bags[bag] for bag in of_sample[samples]] if is_whole else all_bags)
    every = [bag for of_feature in bags for bag in of_feature]
    ids, weights = (torch.cat(parts) for parts in zip(*every, strict=True))
    lengths = torch.tensor([len(ids) for ids, _ in every])
    more = {}
    if not is_whole:
        # TorchRec does not ask for the order of the keys.
        names = list(reversed(batch))
        inverse = torch.stack([batch[name][1][samples] for name in names])
        sizes = [[len(of_feature)] for of_feature in bags]
        more = {"stride_per_key_per_rank": sizes, "inverse_indices": (names, inverse)}
    weights = weights if case.weighted else None
    return KeyedJaggedTensor(list(batch), ids, weights, lengths=lengths, **more)


def loss_of(case, model, batch, samples, *, is_whole):
    looked_up = model(as_batch(case, batch, samples, is_whole=is_whole))
    count = len(range(SAMPLES)[samples])
    return sum(
        example_loss(looked_up[feature], targets[samples]) / count
        for feature, (_, _, targets) in batch.items()
    )


@process_group()
def train_with_shared_bags(cases):
    """By case: the tables before and after (on rank 0), and the losses of this rank's samples."""
    results = []
    for case in cases:
        model = shard(Holder(build_collection(case)), case)
        start = tables_of(model)
        each = SAMPLES // dist.get_world_size()
        samples = slice(each * dist.get_rank(), each * (dist.get_rank() + 1))
        losses = []
        for step in range(STEPS):
            loss = loss_of(case, model, drawn(case, step), samples, is_whole=False)
            loss.backward()
            losses.append(float(loss.detach()))
        results.append((start, tables_of(model), losses))
    return results


def train_with_all_bags(case, start, force_counts=None):
    """In float64: the tables after, by name as `weights`, and the losses of the global batch.

    Args:
        force_counts: see `Unsharded`.
    """
    settings = {**DEFAULTS, **case.arguments}
    model = Unsharded(Holder(build_collection(case, "cpu")), None, force_counts, **settings)
    paths = {name: path for path, (_, name) in model.parts.items()}
    model.copy_tables({path: start[name] for name, path in paths.items()})
    losses = []
    for step in range(STEPS):
        batch = drawn(case, step)
        losses.append(
            model.step(
                lambda plain, batch=batch: loss_of(case, plain, batch, slice(None), is_whole=True)
            )
        )
    return SimpleNamespace(weights={n: model.weights[p] for n, p in paths.items()}, losses=losses)
