"""A loss that reaches only a part of the tables: no rank waits for another, on any plan."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.engine.processes import processes
from stampede.optim import CowClipAdam, Helen, NonFiniteGradientError, TableInit, cowclip_sharders
from support.gathering import gathered
from support.ranks import join, run_ranks

CPU = torch.device("cpu")


class Two(nn.Module):
    """Two tables in one collection."""

    def __init__(self, sequence):
        super().__init__()
        kind, config = (
            (EmbeddingCollection, EmbeddingConfig)
            if sequence
            else (EmbeddingBagCollection, EmbeddingBagConfig)
        )
        self.tables = kind(
            tables=[
                config(name=n, embedding_dim=8, num_embeddings=10, feature_names=[f"f{n}"])
                for n in "ab"
            ],
            device=torch.device("meta"),
        )

    def forward(self, features):
        return self.tables(features)


def sharded(plans, sequence=True, optimizer=CowClipAdam, **arguments):
    """The model, with the tables planned as asked: table-wise ones each on a rank of its own."""
    model = Two(sequence)
    settings = {"lr": 1e-2, "l2": 1e-2, **arguments}
    apply_optimizer_in_backward(optimizer, model.parameters(), settings)
    sharders = cowclip_sharders(TableInit(std=0.1))
    world = dist.get_world_size()
    plan = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
        batch_size=4,
        constraints={
            name: ParameterConstraints(sharding_types=[kind], min_partition=4)
            for name, kind in zip("ab", plans, strict=True)
        },
    ).collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)


def features(ids=(1, 2, 2, 5)):
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["fa", "fb"],
        values=torch.tensor([*ids, *ids]),
        lengths=torch.ones(2 * len(ids), dtype=torch.int64),
    )


def weights(model):
    return gathered({k.split(".")[-2]: v for k, v in model.state_dict().items()})


def train_partly(all_plans):
    """Three steps with a loss of the first table only; the weights of both, for each plan."""
    join()
    results = []
    for plans in all_plans:
        model = sharded(plans)
        start = weights(model)
        for _ in range(3):
            model(features())["fa"].values().square().sum().backward()
        results.append((start, weights(model)))
    dist.barrier()
    dist.destroy_process_group()
    return results


def poison_one_table():
    """What a NaN in the gradient of a table of rank 0 does on every rank."""
    join()
    model = sharded(("table_wise", "table_wise"), sequence=False)
    before = weights(model)
    factor = float("nan") if dist.get_rank() == 0 else 1.0
    looked_up = model(features())
    loss = (looked_up["fa"] * factor).sum() + looked_up["fb"].sum()
    said = ""
    try:
        loss.backward()
    except NonFiniteGradientError as error:
        said = str(error)
    after = weights(model)
    untouched = before["a"] is None or all(before[n].equal(after[n]) for n in before)
    dist.barrier()
    dist.destroy_process_group()
    return said, untouched


def helen_on_two_batches():
    """Two passes on different batches, of which only rank 1 sees the difference."""
    join()
    model = sharded(("table_wise", "row_wise"), sequence=False, optimizer=Helen, rho=1.0)
    before = weights(model)
    sums = []
    for ids in ((1, 2, 2, 5), (1, 2, 2, 5) if dist.get_rank() == 0 else (9, 9, 9, 9)):
        try:
            sum(v.square().sum() for v in model(features(ids)).to_dict().values()).backward()
            sums.append("")
        except ValueError as error:
            sums.append(str(error))
    after = weights(model)
    same = before["a"] is None or all(before[n].equal(after[n]) for n in before)
    for _ in range(2):
        sum(v.square().sum() for v in model(features()).to_dict().values()).backward()
    later = weights(model)
    moved = before["a"] is None or not later["a"].equal(before["a"])
    dist.barrier()
    dist.destroy_process_group()
    return sums, same, moved


PLANS = [
    ("table_wise", "table_wise"),
    ("table_wise", "column_wise"),
    ("row_wise", "table_wise"),
    ("column_wise", "data_parallel"),
    ("data_parallel", "row_wise"),
]


@pytest.fixture(scope="module", params=[1, 2])
def results(request):
    return dict(zip(PLANS, run_ranks(request.param, train_partly, PLANS)[0], strict=True))


@pytest.mark.parametrize("plans", PLANS)
def test_tables_outside_of_the_loss_take_their_step_on_every_plan(results, plans):
    """Sequences of different sharding types are looked up apart; L2 moves all rows of both."""
    start, found = results[plans]
    _, expected = results[PLANS[0]]
    for name in ("a", "b"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)
        assert (found[name] != start[name]).any()


def test_a_nan_stops_also_ranks_whose_tables_are_fine():
    of_ranks = run_ranks(2, poison_one_table)
    assert of_ranks[0] == of_ranks[1]
    said, untouched = of_ranks[0]
    assert "not finite" in said and untouched


def test_helen_refuses_another_batch_in_its_second_pass_on_all_ranks():
    of_ranks = run_ranks(2, helen_on_two_batches)
    assert of_ranks[0][0] == of_ranks[1][0]
    (first, second), same, moved = of_ranks[0]
    assert first == "" and "same batch" in second
    assert same and moved


@pytest.fixture
def alone():
    with processes("cpu"):
        yield


def test_one_model_for_each_call_of_cowclip_sharders(alone):
    sharders = cowclip_sharders()
    models = [Two(sequence=False), Two(sequence=False)]
    for model in models:
        apply_optimizer_in_backward(CowClipAdam, model.parameters(), {})
    first = DistributedModelParallel(models[0], device=CPU, sharders=sharders)
    with pytest.raises(ValueError, match=r"once for each model"):
        DistributedModelParallel(models[1], device=CPU, sharders=sharders)
    assert first is not None and dist.is_initialized()


def test_two_models_with_losses_of_their_own_are_no_accumulation(alone):
    models = [sharded(("table_wise", "table_wise"), sequence=False) for _ in range(2)]
    dense = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    before = [weights(model)["a"] for model in models]
    for _ in range(3):
        for model in models:
            model(features())["fa"].sum().backward()
        dense.step()
    assert all((weights(m)["a"] != b).any() for m, b in zip(models, before, strict=True))
