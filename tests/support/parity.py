"""Cases, their training in TorchRec's sharded tables on any plan, and the same in float64."""

import math
import os
from dataclasses import dataclass, field, replace
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

from stampede.optim import CowClip, TableInit, cowclip_sharders, local_cowclip_tables
from support.gathering import states_of, tables_of
from support.one_table import CLASSES
from support.own_rules import CowClipLion, RootCountClip
from support.ranks import process_group, run_ranks
from support.unsharded import Unsharded
from support.updated_tables import computed


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


CLIP = ("granularity", "ratio", "bound", "threshold", "variant", "columns")
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
            # Gradients of very different sizes, so that some rows are clipped and others not.
            sizes = torch.randn(case.batch, 1, generator=draw).mul(2.0).exp()
            targets = torch.randn(case.batch, spec.dim, generator=draw) * sizes
            batch[feature] = (ids, lengths, weights, targets)
    return batch


def part_of(batch, part):
    """Some samples of every feature."""
    local = {}
    for feature, (ids, lengths, weights, targets) in batch.items():
        ends = [0, *lengths.cumsum(0).tolist()]
        here = slice(ends[part.start], ends[part.stop])
        local[feature] = (ids[here], lengths[part], weights[here], targets[part])
    return local


def local_batch(case, step, passes=1, number=0):
    """This rank's samples of a global batch, or those of one of several backward passes."""
    each = case.batch // dist.get_world_size() // passes
    first = (dist.get_rank() * passes + number) * each
    return part_of(global_batch(case, step), slice(first, first + each))


def build_collection(case, device="meta"):
    tables = []
    for name, spec in zip(case.names, case.tables, strict=True):
        pooling = {"pooling": PoolingType.MEAN if spec.mean else PoolingType.SUM}
        tables.append(
            (EmbeddingConfig if case.sequence else EmbeddingBagConfig)(
                name=name,
                embedding_dim=spec.dim,
                num_embeddings=spec.rows,
                feature_names=case.features[name],
                data_type=DataType[case.data_type],
                **({} if case.sequence else pooling),
            )
        )
    device = torch.device(device)
    if case.sequence:
        return EmbeddingCollection(tables, device)
    return EmbeddingBagCollection(tables, case.weighted, device)


class Holder(torch.nn.Module):
    """A model around a collection, so that the collection has a path."""

    def __init__(self, collection):
        super().__init__()
        self.tables = collection

    def forward(self, features):
        return self.tables(features)


def shard(module, case, optimizer=None, **options):
    """Shard a module whose only tables are those of the case, with its plan.

    Args:
        optimizer: of the tables, and its arguments; by default the case's.
        options: of `cowclip_sharders`.
    """
    if optimizer is None:
        settings = {**DEFAULTS, **case.arguments}
        of_clip = {k: settings.pop(k) for k in CLIP if k in settings}
        if of_clip["granularity"] == "root_count":
            clip = RootCountClip(threshold=of_clip["threshold"], columns=of_clip.get("columns"))
        else:
            clip = CowClip(**of_clip)
        optimizer = {**CLASSES, "lion": CowClipLion}[case.rule], {**settings, "clip": clip}
    tables = [p for name, p in module.named_parameters() if ".embedding" in name]
    apply_optimizer_in_backward(optimizer[0], tables, optimizer[1])
    sharders = cowclip_sharders(TableInit(std=0.1, seed=case.seed), **options)
    plan = plan_of(case, module, sharders)
    kinds = {name: p.sharding_type for of in plan.plan.values() for name, p in of.items()}
    assert kinds == {name: case.sharding_of(name) for name in case.names}
    return DistributedModelParallel(
        module, device=torch.device("cpu"), plan=plan, sharders=sharders
    )


def plan_of(case, module, sharders, kernels=None):
    """The planner's plan with the case's sharding types; kernels that it may choose, or all."""
    world = dist.get_world_size()
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    plan = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=of_node, compute_device="cpu"),
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


def sharded_loss(case, model, batch):
    """Mean over the local samples of a quadratic form of what was looked up."""
    ids, lengths, weights = (torch.cat([of[i] for of in batch.values()]) for i in range(3))
    weights = weights if case.weighted else None
    looked_up = model(KeyedJaggedTensor(list(batch), ids, lengths=lengths, weights=weights))
    loss = torch.zeros(())
    for feature, (_, lengths, _, targets) in batch.items():
        values = looked_up[feature]
        if case.sequence:
            values, targets = values.values(), targets.repeat_interleave(lengths, dim=0)
        loss = loss + example_loss(values, targets) / len(lengths)
    return loss


def example_loss(values, targets):
    return (values * targets.to(values.dtype)).sum() + 0.05 * values.square().sum()


def train(case, model, steps, passes=1):
    """Train on this rank's part of some batches, each in some backward passes."""
    for step in steps:
        for number in range(passes):
            batch = local_batch(case, step, passes, number)
            (sharded_loss(case, model, batch) / passes).backward()


def everything(model):
    """Whole tables and states; the tables on rank 0 only."""
    return {"weights": tables_of(model), "states": states_of(model)}


def train_sharded(case, meanwhile=None, passes=1):
    """A run as one of the ranks; on rank 0: weights, states, plan, counts.

    Args:
        meanwhile: called with the model and the number of each step, after it.
        passes: over how many backward passes a batch is spread.
    """
    registry = get_qcomm_codecs_registry(QCommsConfig(*map(CommType, case.communication)))
    model = Holder(build_collection(case))
    model = shard(model, case, backwards_per_step=passes, qcomm_codecs_registry=registry)
    start = tables_of(model)
    for step in range(1, case.steps + 1):
        train(case, model, [step], passes)
        if meanwhile is not None:
            meanwhile(model, step)
    plan = {name: p for module in model.plan.plan.values() for name, p in module.items()}
    shards = {name: p.sharding_spec.shards if p.sharding_spec else [] for name, p in plan.items()}
    counts = torch.zeros(3, dtype=torch.int64)
    for tables in local_cowclip_tables(model):
        counts += tables.row_counts
    dist.all_reduce(counts)
    return {
        "start": start,
        **everything(model),
        "plan": {name: p.sharding_type for name, p in plan.items()},
        "shards": {name: [tuple(s.shard_sizes) for s in parts] for name, parts in shards.items()},
        "ranks": {name: [s.placement.rank() for s in parts] for name, parts in shards.items()},
        "counts": counts.tolist(),
    }


def run_cases(cases, meanwhile=None, passes=1):
    """Several runs in one set of processes; every rank returns its results."""
    results = []
    with process_group():
        for case in cases:
            with computed(case.way):
                results.append(train_sharded(case, meanwhile, passes))
    return results


@cache
def results_of(count, cases):
    """By case, what each of a tuple of them gave on so many processes, in nodes of two."""
    ranks = run_ranks(count, run_cases, cases, ranks_per_node=min(count, 2))
    return dict(zip(cases, ranks[0], strict=True))


def train_reference(case, start, meanwhile=None, gradient_factor=1, force_counts=None, **changes):
    """The run in float64; `changes` make it another rule, for negative tests.

    Args:
        meanwhile: called with the tables and the number of each step, after it.
        gradient_factor: what all gradients are multiplied by.
        force_counts: as if every row of a batch had occurred so often.
    """
    settings = {**DEFAULTS, **case.arguments, "rule": case.rule, **changes}
    if not case.rule.endswith("adam"):
        settings.setdefault("eps", 1e-8)
    model = Unsharded(Holder(build_collection(case, "cpu")), None, force_counts, **settings)
    paths = {name: path for path, (_, name) in model.parts.items()}
    model.copy_tables({path: start[name] for name, path in paths.items()})
    for step in range(1, case.steps + 1):
        batch = global_batch(case, step)
        model.step(lambda plain, b=batch: sharded_loss(case, plain, b) * gradient_factor)
        if meanwhile is not None:
            meanwhile(model.reference, step)
    tables = model.reference
    for kind in ("weights", "first", "second"):
        values = getattr(tables, kind)
        setattr(tables, kind, {name: values[path] for name, path in paths.items()})
    return tables


_STARTS = {}
# The largest deviation, of the largest movement, that float32 may make in some steps.
TOLERANCE = 1e-4


def start_of(case, found):
    """The tables that a case begins with: the same on any plan and number of processes."""
    start = _STARTS.setdefault(_unsharded(case), found["start"])
    assert all(start[name].equal(found["start"][name]) for name in start)
    return start


def reference_of(case, **options):
    """See `train_reference`; from the start of a case that `start_of` has seen."""
    return _reference_of(_unsharded(case), **options)


@cache
def _reference_of(case, **options):
    return train_reference(case, _STARTS[case], **options)


def _unsharded(case):
    """The case without what a training in one place does not look at."""
    return replace(case, plan="", way=None)


def assert_follows(case, found, **options):
    """Check a result against that in float64, which is returned."""
    start, expected = start_of(case, found), reference_of(case, **options)
    assert deviation(start, found["weights"], expected) < TOLERANCE
    assert state_deviation(case, found["states"], expected) < TOLERANCE
    return expected


def deviation(start, weights, reference):
    """Largest difference of any weight, relative to the largest movement."""
    movement = max(float((reference.weights[n] - start[n].double()).abs().max()) for n in start)
    worst = max(float((weights[n].double() - reference.weights[n]).abs().max()) for n in start)
    return worst / movement if math.isfinite(worst) else math.inf


def state_deviation(case, states, reference):
    """Largest difference of any state, each relative to the largest value of its kind."""
    if case.rule.endswith("adam"):
        kinds = {"momentum1": reference.first, "exp_avg_sq": reference.second}
    elif case.rule.endswith("adagrad"):
        kinds = {"momentum1": reference.second}
    else:
        has_momentum = case.rule == "lion" or case.arguments.get("momentum")
        kinds = {"momentum1": reference.first} if has_momentum else {}
    worst = 0.0
    for key, expected in kinds.items():
        largest = max(float(value.abs().max()) for value in expected.values())
        for name in case.names:
            found = states[name][key].double()
            target = expected[name] if found.ndim == 2 else expected[name][:, 0]
            worst = max(worst, float((found - target).abs().max()) / largest)
    return worst
