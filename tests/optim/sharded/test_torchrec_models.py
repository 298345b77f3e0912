"""TorchRec's own models, which no one here wrote, trained with the two changed lines."""

import copy

import pytest
import torch
from torch.nn import functional
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.test_utils import test_model as theirs
from torchrec.models.deepfm import SimpleDeepFMNNWrapper
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from stampede.optim import CowClip, CowClipAdam, cowclip_sharders, local_cowclip_tables
from support.unsharded import Unsharded, relative_deviation, whole_tables

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


MEAN = {"pooling": PoolingType.MEAN}
MODELS = {
    "DLRM": (dlrm, tables(3), []),
    "DLRM_DCN": (dlrm_dcn, tables(3), []),
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


def batch_of(bags, weighted, step, double=False):
    batch, _ = theirs.ModelInput.generate(
        batch_size=64,
        world_size=1,
        num_float_features=10,
        tables=bags,
        weighted_tables=weighted,
        pooling_avg=4,
        random_seed=step,
        power_law_alpha=1.2,
    )
    if double:
        batch.float_features = batch.float_features.double()
        batch.label = batch.label.double()
    return batch


def shard(model, **settings):
    """The two lines, and TorchRec's optimizer of everything."""
    embeddings = [p for name, p in model.named_parameters() if "embedding" in name]
    arguments = {**SETTINGS, "clip": CowClip(**CLIP), **settings}
    apply_optimizer_in_backward(CowClipAdam, embeddings, arguments)
    model = DistributedModelParallel(model, device=CPU, sharders=cowclip_sharders())
    return model, combined_optimizer(model, torch.optim.SGD)


def combined_optimizer(model, kind):
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: kind(parameters, lr=0.1),
    )
    return CombinedOptimizer([("fused", model.fused_optimizer), ("dense", dense)])


def train(model, optimizer, batch):
    optimizer.zero_grad()
    loss, _ = model(batch)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_follow_the_equations(name):
    torch.manual_seed(0)
    build, bags, weighted = MODELS[name]
    model = build(bags, weighted)
    with_clip = Unsharded(model, dense_lr=0.1, granularity="cowclip", **CLIP, **SETTINGS)
    without = Unsharded(model, dense_lr=0.1, **SETTINGS)
    model, optimizer = shard(model)
    start = whole_tables(model)
    with_clip.copy_tables(start)
    without.copy_tables(start)
    for step in range(5):
        loss = train(model, optimizer, batch_of(bags, weighted, step))
        batch = batch_of(bags, weighted, step, double=True)
        assert with_clip.step(lambda plain, b=batch: plain(b)[0]) == pytest.approx(loss, rel=1e-6)
        without.step(lambda plain, b=batch: plain(b)[0])
    found = whole_tables(model)
    assert relative_deviation(found, with_clip.weights, start) < 1e-4
    assert relative_deviation(found, without.weights, start) > 1e-2
    reference = with_clip.reference
    rows = sum(tables.row_counts for tables in local_cowclip_tables(model)).tolist()
    assert rows == [reference.touched, reference.clipped, 0]
    assert 0 < reference.clipped < reference.touched
    assert reference.largest_count > 10


@pytest.mark.parametrize("dense", [torch.optim.Adam, torch.optim.Adagrad])
def test_state_dicts_of_keyed_and_combined_optimizers_continue_exactly(dense):
    def build(seed):
        torch.manual_seed(seed)
        model, _ = shard(dlrm(tables(3), []), lr=1e-2 if seed == 0 else 1e-3)
        optimizer = combined_optimizer(model, dense)
        optimizer.save_param_groups(True)
        return model, optimizer

    model, optimizer = build(0)
    for step in range(3):
        train(model, optimizer, batch_of(tables(3), [], step))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, batch_of(tables(3), [], 3))

    other, resumed = build(1)
    # Keyed optimizers load only into state that is there.
    train(other, resumed, batch_of(tables(3), [], 9))
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, batch_of(tables(3), [], 3))
    expected, found = whole_tables(model), whole_tables(other)
    assert all(torch.equal(found[path], expected[path]) for path in expected)
    for one, two in zip(model.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(one, two)


class Mixed(torch.nn.Module):
    """Tables `a`, `b` and `c` of one collection, an `nn.EmbeddingBag` and a dense layer."""

    def __init__(self):
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=20,
                    embedding_dim=DIM,
                    feature_names=[f"f{name}"],
                    init_fn=lambda table: torch.nn.init.constant_(table, 0.1),
                )
                for name in "abc"
            ]
        )
        self.single = torch.nn.EmbeddingBag(20, DIM, mode="sum", include_last_offset=True)
        self.dense = torch.nn.Linear(DIM, 1)

    def forward(self, features, single):
        bags = self.tables(features)
        # Each table has its own term, so that none depends on what another one does.
        loss = sum(bags[name].square().sum() for name in ("fa", "fb", "fc"))
        return loss + self.dense(self.single(*single)).square().sum()


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
def test_a_sharder_beside_others_handles_only_its_tables(sharding):
    lengths = torch.full((4,), 2)
    features = KeyedJaggedTensor(
        ["fa", "fb", "fc"], torch.arange(24) % 7, lengths=lengths.repeat(3)
    )
    single = (torch.arange(8) % 5, torch.arange(0, 9, 2))

    def run(first, sharders, steps):
        torch.manual_seed(0)
        model = Mixed()
        parameters = dict(model.tables.embedding_bags.named_parameters())
        for name, kind in (("a", first), ("b", RowWiseAdagrad), ("c", torch.optim.SGD)):
            apply_optimizer_in_backward(kind, [parameters[f"{name}.weight"]], {"lr": 0.05})
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=1, compute_device="cpu"),
            constraints={
                name: ParameterConstraints(sharding_types=[sharding if name == "a" else kind])
                for name, kind in (("a", ""), ("b", "table_wise"), ("c", "table_wise"))
            },
        )
        sharders = [*sharders, EmbeddingBagSharder()]
        model = DistributedModelParallel(
            model, device=CPU, plan=planner.plan(model, sharders), sharders=sharders
        )
        optimizer = combined_optimizer(model, torch.optim.SGD)
        for _ in range(steps):
            optimizer.zero_grad()
            model(features, single).backward()
            optimizer.step()
        return model

    ours = run(CowClipAdam, cowclip_sharders(), steps=3)
    theirs = run(torch.optim.SGD, [EmbeddingBagCollectionSharder()], steps=3)
    assert [tables.table_names for tables in local_cowclip_tables(ours)] == [["a"]]
    found, expected = whole_tables(ours), whole_tables(theirs)
    for name in "abc":
        path = f"tables.embedding_bags.{name}.weight"
        assert torch.equal(found[path], expected[path]) == (name != "a")
        assert not torch.equal(expected[path], torch.full((20, DIM), 0.1))
    for path in ("single.weight", "dense.weight"):
        assert torch.equal(ours.state_dict()[path], theirs.state_dict()[path])
    states = ours.fused_optimizer.state_dict()["state"]
    assert {path: len(state) for path, state in states.items()} == {
        "tables.embedding_bags.a.weight": 3,
        "tables.embedding_bags.b.weight": 1,
        "tables.embedding_bags.c.weight": 0,
    }
