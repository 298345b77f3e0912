"""What a program may do with what it looked up, as with TorchRec's own tables."""

import pytest
import torch

from stampede.optim import local_cowclip_tables
from support.bags import PLANS, Bags, jagged, shard, weights_of, with_cowclip


def looked_up(plan):
    model = shard(with_cowclip(Bags(a=8)), plan)
    return model, model.module.ebc(jagged(["f_a"], torch.tensor([[1, 1, 3]] * 2))).wait()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_it_may_be_changed_in_place(plan):
    found = []
    for in_place in (True, False):
        model, output = looked_up(plan)
        values = output.values()
        values = values.mul_(2.0).add_(1.0) if in_place else values * 2.0 + 1.0
        values.square().sum().backward()
        found.append(weights_of(model)["a"])
    assert torch.equal(*found)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_its_gradient_alone_may_be_asked_for(plan):
    model, output = looked_up(plan)
    before = weights_of(model)["a"]
    values = output.values()
    (gradient,) = torch.autograd.grad(values.square().sum(), values, retain_graph=True)
    assert torch.equal(gradient, 2 * values)
    assert torch.equal(weights_of(model)["a"], before)
    values.square().sum().backward()
    assert not torch.equal(weights_of(model)["a"], before)
    assert {int(tables.step_count) for tables in local_cowclip_tables(model)} == {1}
