"""What TorchRec's programs read and write while rows wait for their steps."""

import copy

import pytest
import torch

from stampede.optim import local_cowclip_tables
from support.bags import PLANS, Bags, shard, step, weights_of, with_cowclip
from support.updated_tables import computed


def trained(way, steps, plan, act=None):
    """A sharded model after some steps, in the middle of which something is done with it."""
    with computed(way, window=30):
        model = shard(with_cowclip(Bags(a=8), l2=1e-2), plan)
        for number in range(steps):
            if act is not None and number == steps // 2:
                arrays = [a for tables in local_cowclip_tables(model) for a in tables.backends]
                assert all(array.waiting.behind == (way == "waiting") for array in arrays)
                act(model)
            step(model)
    return model


def parts_of(value):
    return [s.tensor for s in value.local_shards()] if hasattr(value, "local_shards") else [value]


def load_weights_of_ones(model):
    """The weights only; the state of the optimizer stays."""
    weights = copy.deepcopy(model.state_dict())
    for part in parts_of(weights["ebc.embedding_bags.a.weight"]):
        part.fill_(1.0)
    step(model)
    model.load_state_dict(weights)


def read_state(model):
    read_state.found.append(
        [
            part.clone()
            for of_table in model.fused_optimizer.state_dict()["state"].values()
            for value in of_table.values()
            for part in parts_of(value)
        ]
    )


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("steps", [1, 6])
def test_a_state_dict_has_all_steps(plan, steps):
    swept, waited = (trained(way, steps, plan) for way in ("kernels", "waiting"))
    assert torch.equal(weights_of(swept)["a"], weights_of(waited)["a"])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_optimizers_state_has_all_steps(plan):
    read_state.found = []
    for way in ("kernels", "waiting"):
        trained(way, 8, plan, act=read_state)
    swept, waited = read_state.found
    assert len(swept) >= 3
    assert all(map(torch.equal, swept, waited))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_weights_that_are_loaded_do_not_take_the_steps_of_earlier_ones(plan):
    swept, waited = (
        trained(way, 8, plan, act=load_weights_of_ones) for way in ("kernels", "waiting")
    )
    assert torch.equal(weights_of(swept)["a"], weights_of(waited)["a"])
