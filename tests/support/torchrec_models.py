"""TorchRec's own models and small ones of its parts, trained with the two changed lines."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.test_utils import test_model as theirs
from torchrec.models.deepfm import SimpleDeepFMNNWrapper
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.mlp import MLP
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from stampede.optim import CowClip, CowClipAdam, cowclip_sharders, local_cowclip_tables
from support.gathering import whole_tables
from support.ranks import process_group
from support.unsharded import Unsharded, relative_deviation

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
    """As TorchRec's wrappers of some of its models do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        predicted = self.model(batch.float_features, batch.idlist_features).squeeze()
        return functional.binary_cross_entropy_with_logits(predicted, batch.label), predicted


class TwoTower(nn.Module):
    """As TorchRec's retrieval example: a tower for the query and one for the candidate."""

    def __init__(self, bags):
        super().__init__()
        self.bags = bags
        self.query, self.candidate = MLP(DIM, [16, 8]), MLP(DIM, [16, 8])

    def forward(self, floats, features):
        """Their scalar product."""
        found = self.bags(features)
        query = self.query(found["f0"] + found["f1"])
        return (query * self.candidate(found["g1"] + found["f2"])).sum(1)


class Bert4Rec(nn.Module):
    """As TorchRec's sequence example: items of a history attend to each other."""

    def __init__(self, items):
        super().__init__()
        self.items = items
        self.attention = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(DIM, 1)

    def forward(self, floats, features):
        """From the mean over the history."""
        found = self.items(features)["f0"].to_padded_dense(8)
        return self.last(self.attention(found.to(self.last.weight.dtype)).mean(1))


def with_loss(kind, *arguments):
    """A function that makes a model of TorchRec's from configurations of tables."""
    return lambda bags, _: WithLoss(kind(EmbeddingBagCollection(bags), *arguments))


def of_theirs(name):
    """A function that makes one of TorchRec's test models."""
    return lambda bags, weighted: getattr(theirs, name)(bags, weighted_tables=weighted)


LAYERS = (10, [16, DIM], [16, 1])
MODELS = {
    "DLRM": (with_loss(DLRM, *LAYERS), tables(3), []),
    "DLRM_DCN": (with_loss(DLRM_DCN, *LAYERS, 2, 4), tables(3), []),
    "TwoTower": (with_loss(TwoTower), tables(3), []),
    "Bert4Rec": (
        lambda bags, _: WithLoss(Bert4Rec(EmbeddingCollection(bags))),
        tables(1, kind=EmbeddingConfig),
        [],
    ),
    "DLRM_Projection": (
        with_loss(DLRM_Projection, *LAYERS, *2 * ([16, 3 * DIM],)), tables(3), []
    ),
    "SimpleDeepFMNN": (
        lambda bags, _: SimpleDeepFMNNWrapper(10, EmbeddingBagCollection(bags), 16, 8),
        tables(2) + tables(1, 2, pooling=PoolingType.MEAN),
        [],
    ),
    "TestSparseNN": (of_theirs("TestSparseNN"), tables(3), tables(2, 3)),
    "TestTowerSparseNN": (of_theirs("TestTowerSparseNN"), tables(4), tables(2, 4)),
    "TestTowerCollectionSparseNN": (
        of_theirs("TestTowerCollectionSparseNN"), tables(3), tables(2, 3)
    ),
    "TestMixedEmbeddingSparseArch": (
        of_theirs("TestMixedEmbeddingSparseArch"),
        [*tables(2), *tables(2, 2, EmbeddingConfig)],
        [],
    ),
}  # fmt: skip


def batch_of(bags, weighted, step, rank=None):
    """The global batch of a step in float64, or the part of a rank in float32."""
    ranks = dist.get_world_size()
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
    if rank is not None:
        return parts[rank]
    batch.float_features, batch.label = batch.float_features.double(), batch.label.double()
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


def dense_optimizer(model, kind):
    return KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: kind(parameters, lr=0.1),
    )


def combined_optimizer(model, kind):
    dense = dense_optimizer(model, kind)
    return CombinedOptimizer([("fused", model.fused_optimizer), ("dense", dense)])


def train(model, optimizer, batch):
    """One step."""
    optimizer.zero_grad()
    model(batch)[0].backward()
    optimizer.step()


def deviations(model, found, start, losses, dense=torch.optim.SGD):
    """How far tables are from float64, and from float64 without a clip; the first reference.

    Args:
        losses: functions of the model in float64, one for each step.
    """
    references = []
    for clip in ({"granularity": "cowclip", **CLIP}, {}):
        references.append(Unsharded(model, 0.1, dense=dense, **clip, **SETTINGS))
        references[-1].copy_tables(start)
        for loss in losses:
            references[-1].step(loss)
    worst = [relative_deviation(found, one.weights, start) for one in references]
    return *worst, references[0].reference


def follow(name):
    """See `deviations`, and counts of rows, on rank 0; of five steps of one of `MODELS`."""
    torch.manual_seed(0)
    build, bags, weighted = MODELS[name]
    plain = build(bags, weighted)
    means = [b.name for b in bags if getattr(b, "pooling", None) == PoolingType.MEAN]
    model, optimizer = shard(copy.deepcopy(plain), means)
    start = whole_tables(model)
    for step in range(5):
        train(model, optimizer, batch_of(bags, weighted, step, dist.get_rank()))
    found = whole_tables(model)
    if dist.get_rank():
        return None
    batches = [batch_of(bags, weighted, step) for step in range(5)]
    losses = [lambda plain, batch=batch: plain(batch)[0] for batch in batches]
    counts = sum(tables.row_counts for tables in local_cowclip_tables(model)).tolist()
    return *deviations(plain, found, start, losses), counts


# TorchRec's golden training example (examples/golden_training). In its first table rows wait for
# their steps.
GOLDEN_RANKS, GOLDEN_STEPS = 2, 5
GOLDEN_ROWS = [70_000, *[40] * (len(DEFAULT_CAT_NAMES) - 1)]


def golden_dlrm(device):
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=rows, embedding_dim=10, feature_names=[name]
        )
        for name, rows in zip(DEFAULT_CAT_NAMES, GOLDEN_ROWS, strict=True)
    ]
    bags = EmbeddingBagCollection(configs, device=device)
    return DLRMTrain(DLRM(bags, len(DEFAULT_INT_NAMES), [16, 10], [16, 1], dense_device=CPU))


def golden_batches(rank):
    return RandomRecDataset(
        keys=DEFAULT_CAT_NAMES,
        batch_size=32,
        hash_sizes=GOLDEN_ROWS,
        ids_per_feature=1,
        num_dense=len(DEFAULT_INT_NAMES),
        manual_seed=rank,
        num_batches=GOLDEN_STEPS,
    )


@process_group()
def train_golden(precisions):
    """The example's calls; on rank 0: how far tables are from float64, with and without clip."""
    torch.manual_seed(0)
    plain = golden_dlrm(CPU)
    train_model = golden_dlrm(torch.device("meta"))
    dense = {k: v for k, v in plain.state_dict().items() if ".embedding_bags." not in k}
    train_model.load_state_dict(dense, strict=False)
    apply_optimizer_in_backward(  # line 1
        CowClipAdam,
        train_model.model.sparse_arch.parameters(),
        {**SETTINGS, "clip": CowClip(**CLIP)},
    )
    registry = get_qcomm_codecs_registry(QCommsConfig(*map(CommType, precisions)))
    model = DistributedModelParallel(
        module=train_model,
        device=CPU,
        sharders=cowclip_sharders(qcomm_codecs_registry=registry),  # line 2
    )
    non_fused_optimizer = dense_optimizer(model, torch.optim.Adagrad)
    train_pipeline = TrainPipelineSparseDist(model, non_fused_optimizer, CPU)
    start = whole_tables(model)
    train_iterator = iter(golden_batches(dist.get_rank()))
    for _ in range(GOLDEN_STEPS):
        train_pipeline.progress(train_iterator)
    found = whole_tables(model)
    if dist.get_rank():
        return None
    losses = []
    for parts in zip(*map(golden_batches, range(GOLDEN_RANKS)), strict=True):
        sparse = [part.sparse_features for part in parts]
        # The features of all ranks' batches.
        keys = sparse[0].keys()
        ids = torch.cat([part[key].values() for key in keys for part in sparse])
        lengths = torch.cat([part[key].lengths() for key in keys for part in sparse])
        numbers = torch.cat([part.dense_features for part in parts]).double()
        labels = torch.cat([part.labels for part in parts]).double()
        given = numbers, KeyedJaggedTensor(keys, ids, lengths=lengths)
        losses.append(
            lambda model, given=given, labels=labels: model.loss_fn(
                model.model(*given).squeeze(-1), labels
            )
        )
    return deviations(plain, found, start, losses, torch.optim.Adagrad)[:2]
