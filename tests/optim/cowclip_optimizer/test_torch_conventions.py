"""What a torch optimizer is expected to do."""

import pytest
import torch
from torch import nn

from stampede.optim import (
    CowClipAdam,
)
from support.one_table import EVERY_CLASS, ids_of_step, table, train


@EVERY_CLASS
def test_groups_have_their_own_settings(optimizer_class):
    still, decays, plain = table(), table(), table()
    optimizer = optimizer_class([{"params": still.parameters(), "lr": 0.0}], lr=0.1)
    optimizer.add_param_group({"params": decays.parameters(), "l2": 0.1})
    optimizer.add_param_group({"params": plain.parameters(), "rows": "touched", "clip": None})
    before = still.weight.detach().clone()
    for made in (still, decays, plain):
        (made(torch.tensor([1])) * 1e3).sum().backward()
    optimizer.step()
    assert torch.equal(still.weight, before)
    assert (decays.weight != before).all()
    assert (plain.weight != before).any(1).nonzero().flatten().tolist() == [1]
    assert (plain.weight - before)[1].norm() >= (decays.weight - before)[1].norm()


def test_a_group_that_is_refused_is_not_added():
    one, other = table(), table()
    optimizer = CowClipAdam(one.parameters())
    for wrong, words in (
        ({"params": other.parameters(), "l2": -1}, "l2 is -1"),
        ({"params": other.parameters(), "maximize": True}, "maximize"),
        ({"params": nn.Linear(3, 3).bias}, "no table"),
        ({"params": other.parameters(), "padding_idx": 20}, "no row 20"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group(wrong)
        assert len(optimizer.param_groups) == 1
    train(one, optimizer, 1)


def test_closures_are_called_with_gradients():
    made, other = table(), table()
    optimizer = CowClipAdam(made.parameters(), lr=0.1)
    train(other, CowClipAdam(other.parameters(), lr=0.1), 1)

    def closure():
        optimizer.zero_grad()
        loss = made(ids_of_step(0)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.requires_grad
    assert torch.equal(made.weight, other.weight)


def test_hooks_and_the_profiler_see_the_step():
    made = table()
    optimizer = CowClipAdam(made.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with torch.profiler.profile() as profile:
        train(made, optimizer, 1)
    assert seen == ["before", "after"]
    assert any(event.key == "Optimizer.step#CowClipAdam.step" for event in profile.key_averages())


def test_a_table_without_gradient_is_left_alone():
    used, unused = table(), table()
    before = unused.weight.detach().clone()
    optimizer = CowClipAdam([*used.parameters(), *unused.parameters()], l2=0.1)
    optimizer.step()  # no table has a gradient
    train(used, optimizer, 2)
    assert torch.equal(unused.weight, before)
    assert unused.weight not in optimizer.state


def test_a_batch_of_padding_only_is_a_step():
    made = table(padding_idx=0)
    before = made.weight.detach().clone()
    optimizer = CowClipAdam(made.parameters(), lr=0.1, l2=0.1)
    made(torch.tensor([0, 0])).sum().backward()
    optimizer.step()
    assert torch.equal(made.weight[0], before[0])
    assert (made.weight[1:] != before[1:]).all()


def test_named_parameters_and_frozen_tables_are_taken():
    model = nn.ModuleDict({"a": table(), "b": table()})
    model["b"].requires_grad_(False)
    optimizer = CowClipAdam(model.named_parameters(), lr=0.1)
    train(model["a"], optimizer, 1)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["a.weight", "b.weight"]
