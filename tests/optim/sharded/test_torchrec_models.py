"""TorchRec's own models, which no one here wrote, trained with the two changed lines."""

import copy

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.optim import CowClipAdam, cowclip_sharders, local_cowclip_tables
from support.gathering import whole_tables
from support.torchrec_models import (
    CPU,
    DIM,
    MODELS,
    batch_of,
    combined_optimizer,
    follow,
    shard,
    train,
)


@pytest.mark.slow
@pytest.mark.cases(4)
@pytest.mark.parametrize("name", MODELS)
def test_models_follow_the_equations(name):
    exact, without_clip, reference, counts = follow(name)
    assert exact < 1e-4
    assert without_clip > 1e-2
    assert counts == [reference.touched, reference.clipped, 0]
    assert 0 < reference.clipped < reference.touched
    assert reference.largest_count > 10


@pytest.mark.slow
@pytest.mark.parametrize("dense", [torch.optim.Adam, torch.optim.Adagrad])
def test_state_dicts_of_keyed_and_combined_optimizers_continue_exactly(dense):
    build_dlrm, bags, _ = MODELS["DLRM"]

    def build(seed):
        torch.manual_seed(seed)
        model, _ = shard(build_dlrm(bags, []), lr=1e-2 if seed == 0 else 1e-3)
        optimizer = combined_optimizer(model, dense)
        optimizer.save_param_groups(True)
        return model, optimizer

    model, optimizer = build(0)
    for step in range(3):
        train(model, optimizer, batch_of(bags, [], step, rank=0))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, batch_of(bags, [], 3, rank=0))

    other, resumed = build(1)
    # Keyed optimizers load only into state that is there.
    train(other, resumed, batch_of(bags, [], 9, rank=0))
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, batch_of(bags, [], 3, rank=0))
    expected, found = whole_tables(model), whole_tables(other)
    assert all(torch.equal(found[path], expected[path]) for path in expected)
    for one, two in zip(model.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(one, two)


class Mixed(torch.nn.Module):
    """Tables `a` and `b` of one collection, an `nn.EmbeddingBag` and a dense layer."""

    def __init__(self):
        super().__init__()
        common = {"num_embeddings": 20, "embedding_dim": DIM}
        common["init_fn"] = lambda table: torch.nn.init.constant_(table, 0.1)
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(name=n, feature_names=[f"f{n}"], **common) for n in "ab"]
        )
        self.single = torch.nn.EmbeddingBag(20, DIM, mode="sum", include_last_offset=True)
        self.dense = torch.nn.Linear(DIM, 1)

    def forward(self, features, single):
        bags = self.tables(features)
        # Each table has its own term, so that none depends on what another one does.
        loss = sum(bags[name].square().sum() for name in ("fa", "fb"))
        return loss + self.dense(self.single(*single)).square().sum()


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
def test_a_sharder_beside_others_handles_only_its_tables(sharding):
    features = KeyedJaggedTensor(["fa", "fb"], torch.arange(16) % 7, lengths=torch.full((8,), 2))
    single = (torch.arange(8) % 5, torch.arange(0, 9, 2))

    def run(first, sharders):
        torch.manual_seed(0)
        model = Mixed()
        parameters = dict(model.tables.embedding_bags.named_parameters())
        for name, kind in (("a", first), ("b", RowWiseAdagrad)):
            apply_optimizer_in_backward(kind, [parameters[f"{name}.weight"]], {"lr": 0.05})
        constraints = {
            name: ParameterConstraints(sharding_types=[kind])
            for name, kind in (("a", sharding), ("b", "table_wise"))
        }
        topology = Topology(world_size=1, compute_device="cpu")
        sharders = [*sharders, EmbeddingBagSharder()]
        plan = EmbeddingShardingPlanner(topology, constraints=constraints).plan(model, sharders)
        model = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
        # FBGEMM's dense tables take random numbers from torch's generator, ours do not.
        torch.nn.init.constant_(model.state_dict()["single.weight"], 0.1)
        optimizer = combined_optimizer(model, torch.optim.SGD)
        for _ in range(3):
            optimizer.zero_grad()
            model(features, single).backward()
            optimizer.step()
        return model

    ours = run(CowClipAdam, cowclip_sharders())
    theirs = run(torch.optim.SGD, [EmbeddingBagCollectionSharder()])
    assert [tables.table_names for tables in local_cowclip_tables(ours)] == [["a"]]
    found, expected = whole_tables(ours), whole_tables(theirs)
    for name in "ab":
        path = f"tables.embedding_bags.{name}.weight"
        assert torch.equal(found[path], expected[path]) == (name != "a")
        assert not torch.equal(expected[path], torch.full((20, DIM), 0.1))
    for path in ("single.weight", "dense.weight"):
        assert torch.equal(ours.state_dict()[path], theirs.state_dict()[path])
    states = ours.fused_optimizer.state_dict()["state"]
    assert {path: len(state) for path, state in states.items()} == {
        "tables.embedding_bags.a.weight": 3,
        "tables.embedding_bags.b.weight": 1,
    }
