"""TorchRec's own models and small ones of its parts, trained with the two changed lines."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.test_utils import test_model as theirs
from torchrec.models.deepfm import SimpleDeepFMNNWrapper
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.mlp import MLP
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from stampede.optim import CowClip, CowClipAdam, cowclip_sharders
from support.gathering import whole_tables
from support.unsharded import Unsharded, process_group, relative_deviation

CPU = torch.device("cpu")
DIM = 8
# So that some rows are clipped and others are not.
CLIP = {"ratio": 1e-3, "bound": 1e-3}
SETTINGS = {"lr": 1e-2, "l2": 1e-3}


def tables(count, first=0, kind=EmbeddingBagConfig, **more):
    return [
        kind(
            name=f"t{i}",
            num_embeddings=30 + 10 * i,
            embedding_dim=DIM,
            # The second table has two features.
            feature_names=[f"f{i}", f"g{i}"] if i == 1 else [f"f{i}"],
            **more,
        )
        for i in range(first, first + count)
    ]


class WithLoss(torch.nn.Module):
    """As TorchRec's wrappers of some of its models."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        predicted = self.model(batch.float_features, batch.idlist_features).squeeze()
        return functional.binary_cross_entropy_with_logits(predicted, batch.label), predicted


def dlrm(bags, weighted):
    return WithLoss(DLRM(EmbeddingBagCollection(bags), 10, [16, DIM], [16, 1]))


def dlrm_dcn(bags, weighted):
    return WithLoss(DLRM_DCN(EmbeddingBagCollection(bags), 10, [16, DIM], [16, 1], 2, 4))


def dlrm_projection(bags, weighted):
    sizes = [16, 3 * DIM]
    collection = EmbeddingBagCollection(bags)
    return WithLoss(DLRM_Projection(collection, 10, [16, DIM], [16, 1], sizes, sizes))


def deepfm(bags, weighted):
    return SimpleDeepFMNNWrapper(10, EmbeddingBagCollection(bags), 16, 8)


def sparse_nn(bags, weighted):
    return theirs.TestSparseNN(bags, weighted_tables=weighted)


def towers(bags, weighted):
    return theirs.TestTowerCollectionSparseNN(bags, weighted_tables=weighted)


def tower(bags, weighted):
    return theirs.TestTowerSparseNN(bags, weighted_tables=weighted)


def pooled_and_sequences(bags, weighted):
    return theirs.TestMixedEmbeddingSparseArch(bags)


class TwoTower(nn.Module):
    """As TorchRec's retrieval example: a tower for the query and one for the candidate."""

    def __init__(self, bags):
        super().__init__()
        self.bags = EmbeddingBagCollection(bags)
        self.query, self.candidate = MLP(DIM, [16, 8]), MLP(DIM, [16, 8])

    def forward(self, floats, features):
        """Their scalar product."""
        found = self.bags(features)
        query = self.query(found["f0"] + found["f1"])
        return (query * self.candidate(found["g1"] + found["f2"])).sum(1)


class Bert4Rec(nn.Module):
    """As TorchRec's sequence example: items of a history attend to each other."""

    def __init__(self, tables):
        super().__init__()
        self.items = EmbeddingCollection(tables)
        self.attention = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(DIM, 1)

    def forward(self, floats, features):
        """From the mean over the history."""
        found = self.items(features)["f0"].to_padded_dense(8)
        return self.last(self.attention(found.to(self.last.weight.dtype)).mean(1))


def two_tower(bags, weighted):
    return WithLoss(TwoTower(bags))


def bert4rec(tables, weighted):
    return WithLoss(Bert4Rec(tables))


MEAN = {"pooling": PoolingType.MEAN}
MODELS = {
    "DLRM": (dlrm, tables(3), []),
    "DLRM_DCN": (dlrm_dcn, tables(3), []),
    "TwoTower": (two_tower, tables(3), []),
    "Bert4Rec": (bert4rec, tables(1, kind=EmbeddingConfig), []),
    "DLRM_Projection": (dlrm_projection, tables(3), []),
    "SimpleDeepFMNN": (deepfm, tables(2) + tables(1, 2, **MEAN), []),
    "TestSparseNN": (sparse_nn, tables(3), tables(2, 3)),
    "TestTowerSparseNN": (tower, tables(4), tables(2, 4)),
    "TestTowerCollectionSparseNN": (towers, tables(3), tables(2, 3)),
    "TestMixedEmbeddingSparseArch": (
        pooled_and_sequences,
        tables(2) + tables(2, 2, kind=EmbeddingConfig),
        [],
    ),
}


def batch_of(bags, weighted, step, double=False, ranks=1, rank=None):
    """The global batch of a step, or the part of a rank."""
    batch, parts = theirs.ModelInput.generate(
        batch_size=64 // ranks,
        world_size=ranks,
        num_float_features=10,
        tables=bags,
        weighted_tables=weighted,
        pooling_avg=4,
        random_seed=step,
        power_law_alpha=1.2,
    )
    batch = batch if rank is None else parts[rank]
    if double:
        batch.float_features = batch.float_features.double()
        batch.label = batch.label.double()
    return batch


def shard(model, mean=(), **settings):
    """The two lines, and TorchRec's optimizer of everything.

    Args:
        mean: tables with mean pooling, which are not to be sharded by rows beside others.
    """
    embeddings = [p for name, p in model.named_parameters() if "embedding" in name]
    arguments = {**SETTINGS, "clip": CowClip(**CLIP), **settings}
    apply_optimizer_in_backward(CowClipAdam, embeddings, arguments)
    sharders, world = cowclip_sharders(), dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=["table_wise"]) for name in mean},
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    return model, combined_optimizer(model, torch.optim.SGD)


def combined_optimizer(model, kind):
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: kind(parameters, lr=0.1),
    )
    return CombinedOptimizer([("fused", model.fused_optimizer), ("dense", dense)])


def train(model, optimizer, batch):
    """One step; returns the loss."""
    optimizer.zero_grad()
    loss, _ = model(batch)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def train_on_ranks(name, steps=5):
    """On rank 0: how far the tables are from float64, and from it without a clip."""
    with process_group():
        torch.manual_seed(0)
        build, bags, weighted = MODELS[name]
        plain = build(bags, weighted)
        references = [
            Unsharded(plain, dense_lr=0.1, **clip, **SETTINGS)
            for clip in ({"granularity": "cowclip", **CLIP}, {})
        ]
        means = [b.name for b in bags if getattr(b, "pooling", None) == PoolingType.MEAN]
        model, optimizer = shard(plain, means)
        start = whole_tables(model)
        ranks = {"ranks": dist.get_world_size()}
        for step in range(steps):
            train(model, optimizer, batch_of(bags, weighted, step, **ranks, rank=dist.get_rank()))
        found = whole_tables(model)
        if dist.get_rank():
            return None
        for reference in references:
            reference.copy_tables(start)
            for step in range(steps):
                batch = batch_of(bags, weighted, step, double=True, **ranks)
                reference.step(lambda model, batch=batch: model(batch)[0])
        return [relative_deviation(found, one.weights, start) for one in references]
