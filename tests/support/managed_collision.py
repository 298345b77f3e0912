"""Tables behind managed collision, shaped as TorchRec's ZCH example, beside float64 plain torch."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.optim import CowClip, CowClipAdam, cowclip_sharders, local_cowclip_tables
from support.gathering import tables_of
from support.parity import deviation
from support.ranks import process_group
from support.reference import ReferenceTables
from support.updated_tables import computed

CPU = torch.device("cpu")
INPUT = 4000
FRESH = 0.25
SETTINGS = {"lr": 1e-2, "l2": 1e-3}
CLIP = {"ratio": 0.05, "bound": 1e-3}
# The first table has two features: TorchRec names the tables it evicts from by their positions.
FEATURES = {"table_0": ["feature_0", "feature_2"], "table_1": ["feature_1"]}
NAMES = ["feature_0", "feature_2", "feature_1"]


class SparseArch(nn.Module):
    """Two tables whose rows are given to raw ids as these are seen."""

    def __init__(self, pooled, rows):
        super().__init__()
        self.pooled = pooled
        kind = EmbeddingBagConfig if pooled else EmbeddingConfig
        tables = [
            kind(
                name=name,
                num_embeddings=rows,
                embedding_dim=8,
                feature_names=features,
                init_fn=partial(nn.init.constant_, val=FRESH),
            )
            for name, features in FEATURES.items()
        ]
        # The planner divides the buckets among ranks.
        module = partial(MCHManagedCollisionModule, rows, CPU, input_hash_size=INPUT, buckets=4)
        modules = {
            name: module(eviction_policy=DistanceLFU_EvictionPolicy(), eviction_interval=interval)
            for name, interval in zip(FEATURES, (2, 1), strict=True)
        }
        collections = ManagedCollisionCollection(modules, tables)
        of_tables, behind = EmbeddingCollection, ManagedCollisionEmbeddingCollection
        if pooled:
            of_tables, behind = EmbeddingBagCollection, ManagedCollisionEmbeddingBagCollection
        self.mc = behind(of_tables(tables, device=CPU), collections, True)

    def forward(self, features):
        """By feature what was looked up, and the rows that it was looked up in."""
        embedded, rows = (awaitable.wait() for awaitable in self.mc(features))
        return embedded.to_dict() if self.pooled else embedded, rows


def train(pooled, rows, moved, by_hand, steps=8):
    """How far the tables are from float64 at the end, on rank 0, and what became of the ids.

    Args:
        pooled: whether bags are pooled.
        rows: of each table.
        moved: which rows move, `all` or `touched`.
        by_hand: whether TorchRec's sharders of managed collision are given ours by hand.
    """
    rank = dist.get_rank()
    model = SparseArch(pooled, rows)
    tables = [p for name, p in model.named_parameters() if "embedding" in name]
    apply_optimizer_in_backward(
        CowClipAdam, tables, {**SETTINGS, "clip": CowClip(**CLIP), "rows": moved}
    )
    sharders, plan = cowclip_sharders(), None
    if by_hand:
        # As could be written before they were among ours.
        bags, sequences = sharders[:2]
        sharders = [
            ManagedCollisionEmbeddingBagCollectionSharder(ebc_sharder=bags),
            ManagedCollisionEmbeddingCollectionSharder(ec_sharder=sequences),
        ]
        # TorchRec's offer kernels that its planner does not know on a CPU.
        world = dist.get_world_size()
        fused = ParameterConstraints(compute_kernels=["fused"])
        plan = EmbeddingShardingPlanner(
            topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
            constraints=dict.fromkeys(FEATURES, fused),
        ).collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    assert isinstance(model.module.mc, ShardedModule)
    evicted = recorded_evictions(model.module.mc)
    # Seen through its state, each rank's part of the rows.
    start = {name: torch.full((rows, 8), FRESH) for name in FEATURES}
    reference = ReferenceTables(start, granularity="cowclip", rows=moved, **SETTINGS, **CLIP)
    for step in range(steps):
        evicted.clear()
        looked_up, where = model(batch(step, rank, pooled))
        loss = sum(loss_of(v if pooled else v.values()) for v in looked_up.values())
        loss.backward()
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (dict(evicted), where.to_dict()))
        for of_rank, _ in everywhere:
            for table, rows_anew in of_rank.items():
                reference.weights[table][rows_anew] = FRESH
                reference.first[table][rows_anew] = reference.second[table][rows_anew] = 0.0
        follow(reference, [rows_of_rank for _, rows_of_rank in everywhere], pooled)
    backends = [backend for tbe in local_cowclip_tables(model) for backend in tbe.backends]
    waited = [b.waiting is not None and b.waiting.behind for b in backends]
    found = tables_of(model)
    worst = deviation(start, found, reference) if rank == 0 else None
    # What every id is mapped to, asked on each rank alone.
    model.eval()
    every = torch.arange(INPUT)
    lengths = torch.ones(3 * len(every), dtype=torch.long)
    _, where = model(KeyedJaggedTensor(NAMES, every.repeat(3), lengths=lengths))
    mapped = {name: entry.values().tolist() for name, entry in where.to_dict().items()}
    return {"deviation": worst, "mapped": mapped, "waited": any(waited)}


def batch(step, rank, pooled):
    """This rank's samples; the ids of later steps drive out some of those of earlier ones."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, INPUT, (len(NAMES) * 16, 3), generator=draw)
    # Some come on every rank, and some in every step.
    ids[:, 0] = (ids[:, 0] % 12) * 331
    ids[:, 1] = ids[:, 1] // 16 + step * 250
    return KeyedJaggedTensor(NAMES, ids.flatten() % INPUT, lengths=torch.full((len(ids),), 3))


def loss_of(values):
    """The mean over this rank's 16 samples."""
    return (values.square().sum() + values.sum()) / 16


def recorded_evictions(module):
    """By table, the rows of the whole table that begin anew; filled with each lookup."""
    evict, found = module._evict, {}

    def recorded(evictions):
        for table, rows in evictions.items():
            if rows is not None:
                first = module._managed_collision_collection._table_to_offset[table]
                found[table] = (rows + first).tolist()
        evict(evictions)

    module._evict = recorded
    return found


def follow(reference, where, pooled):
    """One step of the reference, from the rows that all ranks looked up."""
    weights = {name: w.clone().requires_grad_() for name, w in reference.weights.items()}
    counts = {name: torch.zeros(len(w), dtype=torch.int64) for name, w in weights.items()}
    loss = 0.0
    for of_rank in where:
        for table, features in FEATURES.items():
            for feature in features:
                rows = of_rank[feature].values()
                values = weights[table][rows]
                if pooled:
                    values = values.view(16, 3, -1).sum(1)
                loss = loss + loss_of(values) / len(where)
                counts[table] += torch.bincount(rows, minlength=len(counts[table]))
    grads = torch.autograd.grad(loss, list(weights.values()))
    reference.step(dict(zip(weights, grads, strict=True)), counts)


@process_group()
def train_all(runs):
    """Several of them in one set of processes."""
    results = []
    for way, arguments in runs:
        with computed(way):
            results.append(train(*arguments))
    return results
