"""The two halves of a step, and what interrupts them."""

import copy

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from stampede.optim.helen import Helen
from stampede.optim.nonfinite import NonFiniteGradientError
from support.helen_model import Net, batch, closure_of, counts_of, largest_difference, logits, train
from support.helen_reference import ReferenceHelen


@pytest.mark.parametrize("net_pert", [False, True])
def test_a_step_with_zero_gradients_is_finite_and_changes_nothing(net_pert):
    model = Net()
    before = copy.deepcopy(model.state_dict())
    users, items, _ = batch(0)

    def closure():
        loss = model(users, items).sum() * 0.0
        loss.backward()
        return loss

    Helen(model.by_kind(), net_pert=net_pert).step(closure)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("net_pert", [False, True])
def test_two_calls_equal_step_even_if_gradients_share_memory(net_pert):
    one, other = Net(), Net()
    train(one, Helen(one.by_kind(), net_pert=net_pert), 3)
    optimizer = Helen(other.by_kind(), net_pert=net_pert)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        closure = closure_of(other, step)
        closure()
        buffers = {param: param.grad for param in other.hidden.parameters()}
        optimizer.first_step()
        # DistributedDataParallel writes the second gradient where the first one was.
        for param, buffer in buffers.items():
            param.grad = buffer.zero_()
        closure()
        optimizer.second_step()
    assert largest_difference(one, dict(other.named_parameters())) == 0.0


def test_step_returns_the_loss_before_the_step():
    model = Net()
    peer = ReferenceHelen(dict(model.named_parameters()), ("user.weight", "item.weight"))
    users, items, labels = batch(0)
    expected = peer.step(lambda w: bce(logits(w, users, items), labels), counts_of(users, items), 1)
    returned = Helen(model.by_kind()).step(closure_of(model, 0))
    assert returned.item() == pytest.approx(expected, rel=1e-12)


def test_restore_undoes_the_first_step_bit_for_bit():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    optimizer = Helen(model.by_kind(), net_pert=True)
    closure_of(model, 0)()
    optimizer.first_step()
    moved = [name for name, value in model.state_dict().items() if (value != before[name]).any()]
    assert len(moved) == len(before)
    optimizer.restore()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_a_closure_that_fails_leaves_the_weights_where_they_were():
    model, calls = Net(), []
    before = copy.deepcopy(model.state_dict())
    optimizer, inner = Helen(model.by_kind()), closure_of(model, 0)

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("second")
        return inner()

    with pytest.raises(KeyError, match="second"):
        optimizer.step(closure)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    train(model, optimizer, 1)


def test_steps_out_of_order_are_refused():
    model = Net()
    optimizer = Helen(model.by_kind())
    with pytest.raises(RuntimeError, match="without first_step"):
        optimizer.second_step()
    closure_of(model, 0)()
    optimizer.first_step()
    with pytest.raises(RuntimeError, match="called twice"):
        optimizer.first_step()
    with pytest.raises(ValueError, match="closure"):
        optimizer.step()


def test_a_gradient_that_is_not_finite_changes_nothing():
    model, calls = Net(), []
    before = copy.deepcopy(model.state_dict())
    optimizer = Helen(model.by_kind(), l2=0.1)
    users, items, labels = batch(0)

    def closure():
        calls.append(1)
        loss = bce(model(users, items), labels) * (float("nan") if len(calls) == 2 else 1.0)
        loss.backward()
        return loss

    with pytest.raises(NonFiniteGradientError):
        optimizer.step(closure)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not any(state["step"] for state in optimizer.state.values())
