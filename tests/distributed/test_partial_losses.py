"""A loss that reaches only a part of the tables: no rank waits for another, on any plan."""

import pytest
import torch
import torch.distributed as dist

from stampede.engine.processes import processes
from support.partial import (
    features,
    helen_on_two_batches,
    poison_one_table,
    sharded,
    train_partly,
    weights,
)
from support.ranks import run_ranks

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
    from torchrec.distributed import DistributedModelParallel
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    from stampede.optim import CowClipAdam, cowclip_sharders
    from support.partial import CPU, Two

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
