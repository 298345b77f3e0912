"""A loss that reaches only a part of the tables: no rank waits for another, on any plan."""

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.engine.processes import processes
from stampede.optim import CowClipAdam, cowclip_sharders
from support.gathering import tables_of
from support.parity import Case, Holder, Table, build_collection, shard
from support.ranks import process_group, run_ranks

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
