"""A loss that reaches a part of the tables, or a rank without tables: no rank waits for another."""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.engine.processes import processes
from stampede.optim import (
    CowClipAdam,
    Helen,
    NonFiniteGradientError,
    cowclip_sharders,
    local_cowclip_tables,
    table_update,
)
from support.gathering import tables_of
from support.parity import Case, Holder, Table, build_collection, shard
from support.ranks import run_ranks
from support.unsharded import process_group
from support.updated_tables import computed

TABLES = (Table(10, 8), Table(10, 8))
FEATURES = ("f0_0", "f1_0")


def sharded(plans, sequence=True, optimizer=CowClipAdam, **arguments):
    """Two tables in one collection; table-wise ones are each on a rank of its own."""
    case = Case(plans, TABLES, sequence=sequence)
    arguments = {"lr": 1e-2, "l2": 1e-2, **arguments}
    return shard(Holder(build_collection(case)), case, optimizer=(optimizer, arguments))


def features(ids=(1, 2, 2, 5)):
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(FEATURES),
        values=torch.tensor([*ids, *ids]),
        lengths=torch.ones(2 * len(ids), dtype=torch.int64),
    )


def same_tables(one, other):
    """Compared on rank 0, which has them."""
    return dist.get_rank() != 0 or all(one[name].equal(other[name]) for name in one)


def train_partly(all_plans):
    """Three steps with a loss of the first table only; the weights of both, for each plan."""
    results = []
    with process_group():
        for plans in all_plans:
            model = sharded(plans)
            start = tables_of(model)
            for _ in range(3):
                model(features())[FEATURES[0]].values().square().sum().backward()
            results.append((start, tables_of(model)))
    return results


def helen_on_two_batches():
    """Two passes on different batches, of which only rank 1 sees the difference."""
    with process_group():
        model = sharded(("table_wise", "row_wise"), sequence=False, optimizer=Helen, rho=1.0)
        before = tables_of(model)
        said = []
        for ids in ((1, 2, 2, 5), (1, 2, 2, 5) if dist.get_rank() == 0 else (9, 9, 9, 9)):
            try:
                model(features(ids)).values().square().sum().backward()
                said.append("")
            except ValueError as error:
                said.append(str(error))
        same = same_tables(before, tables_of(model))
        for _ in range(2):
            model(features()).values().square().sum().backward()
        after = tables_of(model)
        moved = dist.get_rank() != 0 or not after["t0"].equal(before["t0"])
        return said, same, moved


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
    for name in ("t0", "t1"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)
        assert (found[name] != start[name]).any()


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
    models = [Holder(build_collection(Case("table_wise", TABLES))) for _ in range(2)]
    for model in models:
        apply_optimizer_in_backward(CowClipAdam, model.parameters(), {})
    first = DistributedModelParallel(models[0], device=torch.device("cpu"), sharders=sharders)
    with pytest.raises(ValueError, match=r"once for each model"):
        DistributedModelParallel(models[1], device=torch.device("cpu"), sharders=sharders)
    assert first is not None and dist.is_initialized()


def test_two_models_with_losses_of_their_own_are_no_accumulation(alone):
    models = [sharded(("table_wise", "table_wise"), sequence=False) for _ in range(2)]
    dense = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    before = [tables_of(model)["t0"] for model in models]
    for _ in range(3):
        for model in models:
            model(features())[FEATURES[0]].sum().backward()
        dense.step()
    assert all((tables_of(m)["t0"] != b).any() for m, b in zip(models, before, strict=True))


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

# On two ranks one has no table.
ONE_TABLE = Case("table_wise", (Table(50, 8),))


def train(way, lookups, poisoned=None):
    """Some steps of several lookups each; sums of the rows on each rank, and who has tables.

    Args:
        lookups: of each step.
        poisoned: number of a step, from 0, whose gradient is not finite.
    """
    with process_group(), computed(way):
        model = shard(Holder(build_collection(ONE_TABLE)), ONE_TABLE, backwards_per_step=None)
        found = None
        for step, count in enumerate(lookups):
            ids = torch.tensor([step, 3, 4, dist.get_rank()])
            lengths = torch.ones(4, dtype=torch.int32)
            batch = KeyedJaggedTensor.from_lengths_sync(keys=["f0_0"], values=ids, lengths=lengths)
            loss = sum(model(batch).values().sum() for _ in range(count))
            (loss * float("nan") if step == poisoned else loss).backward()
        try:
            model.state_dict()
        except NonFiniteGradientError as failure:
            found = failure.ago
        tables = local_cowclip_tables(model)
        weights = [w.double().sum().item() for t in tables for w in t.split_embedding_weights()]
        is_queued = table_update(model).flag is not None
        return {"weights": weights, "found": found, "is_queued": is_queued}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("lookups", [(1, 1, 1), (1, 2, 2, 1)], ids=["one", "several"])
def test_all_ranks_take_the_same_way_also_one_without_tables(lookups):
    queued = run_ranks(2, train, "queued", lookups)
    swept = run_ranks(2, train, "kernels", lookups)
    assert [rank["is_queued"] for rank in queued] == [True, True]
    assert sorted(len(rank["weights"]) for rank in queued) == [0, 1]
    for one, other in zip(queued, swept, strict=True):
        assert one["weights"] == pytest.approx(other["weights"], rel=1e-6)


@needs_triton
def test_all_ranks_learn_of_a_gradient_that_is_not_finite():
    ranks = run_ranks(2, train, "queued", (1, 1, 1), 1)
    assert [rank["found"] for rank in ranks] == [1, 1]
