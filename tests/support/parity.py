"""Cases, and their training in TorchRec's sharded tables on any plan."""

from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import stampede.optim as optim
from stampede.optim import CowClip, TableInit, cowclip_sharders, local_cowclip_tables
from support.gathering import states_of, tables_of
from support.ranks import run_ranks
from support.unsharded import process_group
from support.updated_tables import computed

RULES = {
    "adam": "CowClipAdam",
    "rowwise_adam": "CowClipRowWiseAdam",
    "adagrad": "CowClipAdagrad",
    "rowwise_adagrad": "CowClipRowWiseAdagrad",
    "sgd": "CowClipSGD",
}


@dataclass(frozen=True)
class Table:
    """A table: its rows and width, and how many features look it up.

    Attributes:
        columns: widths of its parts where it is sharded by columns; the planner's if empty. On
            one process they must be equal: TorchRec gives the parts of a rank to one parameter.
    """

    rows: int
    dim: int = 12
    features: int = 1
    mean: bool = False
    columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        plan: sharding type of all tables, or one for each.
        arguments: of the optimizer, flat: those of the clip too.
        empty_rank: one rank's part of every other batch has no ids.
        absent: ids of the upper half appear only in the first and the last step.
        way: how the update is computed, see `support.updated_tables.computed`.
    """

    plan: tuple[str, ...] | str
    tables: tuple[Table, ...] = (Table(40), Table(23, features=2), Table(1), Table(60, mean=True))
    rule: str = "adam"
    arguments: dict[str, Any] = field(default_factory=dict)
    sequence: bool = False
    weighted: bool = False
    steps: int = 6
    batch: int = 32
    seed: int = 0
    empty_rank: bool = True
    absent: bool = True
    data_type: str = "FP32"
    gradient_scale: float = 1.0
    # Where it makes no difference, rows take their steps later; as it is for None.
    way: str | None = "waiting"
    # Precision in which embeddings and their gradients are sent.
    communication: tuple[str, str] = ("fp32", "fp32")

    def __hash__(self):
        return hash(repr(self))

    @property
    def names(self):
        return [f"t{i}" for i in range(len(self.tables))]

    @property
    def features(self):
        return {
            f"t{i}": [f"f{i}_{j}" for j in range(table.features)]
            for i, table in enumerate(self.tables)
        }

    def sharding_of(self, table):
        return self.plan if isinstance(self.plan, str) else self.plan[int(table[1:])]


CLIP = ("granularity", "ratio", "bound", "threshold", "variant", "columns", "quantile")
DEFAULTS = {"lr": 1e-2, "l2": 1e-3, "granularity": "cowclip", "bound": 1e-3, "ratio": 0.2}


def global_batch(case, step):
    """Ids, lengths, weights of samples and targets by feature, for the whole global batch."""
    draw = torch.Generator().manual_seed(1000 * case.seed + step)
    batch = {}
    for table, spec in zip(case.names, case.tables, strict=True):
        for feature in case.features[table]:
            lengths = torch.randint(0, 4, (case.batch,), generator=draw)
            if case.empty_rank and step % 2:
                lengths[case.batch // 2 :] = 0
            uniform = torch.rand(int(lengths.sum()), generator=draw)
            ids = (spec.rows * uniform**2.5).long().clamp_max(spec.rows - 1)
            if case.absent and 1 < step < case.steps:
                ids = ids % max(1, spec.rows // 2)
            weights = torch.rand(len(ids), generator=draw) + 0.5
            dim = spec.dim
            # Gradients of very different sizes, so that some rows are clipped and others not.
            sizes = torch.randn(case.batch, 1, generator=draw).mul(2.0).exp()
            targets = torch.randn(case.batch, dim, generator=draw) * sizes
            batch[feature] = (ids, lengths, weights, targets * case.gradient_scale)
    return batch


def train_sharded(case, local_world_size=None, meanwhile=None, passes=1):
    """Train on this rank's part of the batches; on rank 0: weights, states, plan, counts.

    Args:
        meanwhile: called with the model and the number of each step, after it.
        passes: over how many backward passes a batch is spread.
    """
    forward, backward = map(CommType, case.communication)
    model = shard(
        Holder(build_collection(case)),
        case,
        local_world_size,
        backwards_per_step=passes,
        qcomm_codecs_registry=get_qcomm_codecs_registry(QCommsConfig(forward, backward)),
    )
    start = tables_of(model)
    part = local_part(case)
    size = (part.stop - part.start) // passes
    for step in range(1, case.steps + 1):
        for first in range(part.start, part.start + passes * size, size):
            local = local_batch(global_batch(case, step), slice(first, first + size))
            (sharded_loss(case, model, local) / passes).backward()
        if meanwhile is not None:
            meanwhile(model, step)
    plan = {name: p for module in model.plan.plan.values() for name, p in module.items()}
    shards = {name: p.sharding_spec.shards if p.sharding_spec else [] for name, p in plan.items()}
    counts = sum(
        (tables.row_counts for tables in local_cowclip_tables(model)),
        start=torch.zeros(3, dtype=torch.int64),
    )
    dist.all_reduce(counts)
    return {
        "start": start,
        "weights": tables_of(model),
        "states": states_of(model.fused_optimizer.state_dict()["state"]),
        "plan": {name: p.sharding_type for name, p in plan.items()},
        "shards": {name: [tuple(s.shard_sizes) for s in parts] for name, parts in shards.items()},
        "ranks": {name: [s.placement.rank() for s in parts] for name, parts in shards.items()},
        "counts": counts.tolist(),
    }


def shard(module, case, local_world_size=None, optimizer=None, **options):
    """Shard a module whose only tables are those of the case, with its plan.

    Args:
        optimizer: of the tables, and its arguments; by default the case's.
        options: of `cowclip_sharders`.
    """
    if optimizer is None:
        settings = {**DEFAULTS, **case.arguments}
        clip = CowClip(**{k: settings.pop(k) for k in CLIP if k in settings})
        optimizer = getattr(optim, RULES[case.rule]), {**settings, "clip": clip}
    tables = [p for name, p in module.named_parameters() if ".embedding" in name]
    apply_optimizer_in_backward(optimizer[0], tables, optimizer[1])
    sharders = cowclip_sharders(TableInit(std=0.1, seed=case.seed), **options)
    plan = plan_of(case, module, sharders, local_world_size)
    kinds = {name: p.sharding_type for of in plan.plan.values() for name, p in of.items()}
    assert kinds == {name: case.sharding_of(name) for name in case.names}
    return DistributedModelParallel(
        module, device=torch.device("cpu"), plan=plan, sharders=sharders
    )


def plan_of(case, module, sharders, local_world_size=None, kernels=None):
    """The planner's plan with the case's sharding types.

    Args:
        kernels: compute kernels that the planner may choose; all by default.
    """
    world = dist.get_world_size()
    plan = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world,
            local_world_size=local_world_size or min(world, 2),
            compute_device="cpu",
        ),
        batch_size=case.batch // world,
        constraints={
            table: ParameterConstraints([case.sharding_of(table)], kernels, min_partition=4)
            for table in case.names
        },
    ).collective_plan(module, sharders, dist.group.WORLD)
    for of_module in plan.plan.values():
        for table, sharding in of_module.items():
            spec = case.tables[int(table[1:])]
            possible = world > 1 or len(set(spec.columns)) == 1
            if possible and spec.columns and sharding.sharding_type == "column_wise":
                sharding.ranks = [part % world for part in range(len(spec.columns))]
                sharding.sharding_spec = EnumerableShardingSpec(
                    [
                        ShardMetadata([0, stop - width], [spec.rows, width], f"rank:{rank}/cpu")
                        for rank, width, stop in zip(
                            sharding.ranks, spec.columns, accumulate(spec.columns), strict=True
                        )
                    ]
                )
    return plan


class Holder(torch.nn.Module):
    """A model around a collection, so that the collection has a path."""

    def __init__(self, collection):
        super().__init__()
        self.tables = collection

    def forward(self, features):
        return self.tables(features)


def build_collection(case, device="meta"):
    pooled = not case.sequence
    collection, config = (
        (EmbeddingBagCollection, EmbeddingBagConfig)
        if pooled
        else (EmbeddingCollection, EmbeddingConfig)
    )
    tables = []
    for name, spec in zip(case.names, case.tables, strict=True):
        pooling = PoolingType.MEAN if spec.mean else PoolingType.SUM
        tables.append(
            config(
                name=name,
                embedding_dim=spec.dim,
                num_embeddings=spec.rows,
                feature_names=case.features[name],
                data_type=DataType[case.data_type],
                **({"pooling": pooling} if pooled else {}),
            )
        )
    more = {"is_weighted": case.weighted} if pooled else {}
    return collection(tables=tables, device=torch.device(device), **more)


def local_part(case):
    """This rank's samples of a global batch."""
    each = case.batch // dist.get_world_size()
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def local_batch(batch, part):
    """One rank's part of every feature."""
    local = {}
    for feature, (ids, lengths, weights, targets) in batch.items():
        ends = lengths.cumsum(0)
        first = int(ends[part.start - 1]) if part.start else 0
        last = int(ends[part.stop - 1])
        local[feature] = (ids[first:last], lengths[part], weights[first:last], targets[part])
    return local


def sharded_loss(case, model, batch):
    """Mean over the local samples of a quadratic form of what was looked up."""
    features = KeyedJaggedTensor(
        keys=list(batch),
        values=torch.cat([entry[0] for entry in batch.values()]),
        lengths=torch.cat([entry[1] for entry in batch.values()]),
        weights=torch.cat([entry[2] for entry in batch.values()]) if case.weighted else None,
    )
    looked_up = model(features)
    samples = len(next(iter(batch.values()))[1])
    loss = torch.zeros(())
    for feature, (_, lengths, _, targets) in batch.items():
        if case.sequence:
            values = looked_up[feature].values()
            targets = targets.repeat_interleave(lengths, dim=0)
        else:
            values = looked_up[feature]
        loss = loss + example_loss(values, targets) / samples
    return loss


def example_loss(values, targets):
    return (values * targets.to(values.dtype)).sum() + 0.05 * values.square().sum()


def run_cases(cases, local_world_size=None, meanwhile=None, passes=1):
    """Several runs in one set of processes; every rank returns its results."""
    results = []
    with process_group():
        for case in cases:
            with computed(case.way):
                results.append(train_sharded(case, local_world_size, meanwhile, passes))
    return results


@cache
def results_of(count, cases):
    """By case, what each of a tuple of them gave on so many processes, in nodes of two."""
    per_node = min(count, 2)
    ranks = run_ranks(count, run_cases, cases, per_node, ranks_per_node=per_node)
    return dict(zip(cases, ranks[0], strict=True))
