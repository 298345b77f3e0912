"""Gradients that are not finite, and the scaler that looks for them."""

import copy
import math

import pytest
import torch

from stampede.optim import (
    CowClip,
    CowClipAdam,
    NonFiniteGradientError,
)
from support.one_table import EVERY_CLASS, ids_of_step, table, train


def test_a_grad_scaler_changes_nothing():
    plain, scaled = table(), table()
    train(plain, CowClipAdam(plain.parameters(), lr=0.1, clip=CowClip(ratio=0.1)), 3)
    optimizer = CowClipAdam(scaled.parameters(), lr=0.1, clip=CowClip(ratio=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(scaled(ids_of_step(step)).square().sum()).backward()
        if step == 1:
            scaler.unscale_(optimizer)  # step() does it otherwise
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(plain.weight, scaled.weight)


def test_a_grad_scaler_skips_a_step_that_overflowed():
    made = table()
    before = made.weight.detach().clone()
    optimizer = CowClipAdam(made.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(made(torch.tensor([1, 2])).square().sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert torch.equal(made.weight, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@EVERY_CLASS
def test_a_gradient_that_is_not_finite_is_an_error_by_default(optimizer_class, bad):
    good, poisoned = table(), table()
    optimizer = optimizer_class([*good.parameters(), *poisoned.parameters()], l2=0.1)
    train(poisoned, optimizer, 1)
    kept = copy.deepcopy(optimizer.state_dict()["state"])
    before = poisoned.weight.detach().clone()
    optimizer.zero_grad()
    good(torch.tensor([1])).sum().backward()
    (poisoned(torch.tensor([1, 2])) * torch.tensor([[1.0], [bad]])).sum().backward()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    assert torch.equal(good.weight, table().weight)
    assert torch.equal(poisoned.weight, before)
    for name, value in kept[1].items():
        assert torch.equal(optimizer.state[poisoned.weight][name], value)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("rows", ["all", "touched"])
@EVERY_CLASS
def test_rows_that_are_not_finite_can_be_left_out(optimizer_class, rows, dense):
    """The others move as if these had not been in the batch."""
    results = []
    for ids, factors in (([1, 2, 2], [1.0, 1.0, math.nan]), ([1], [1.0])):
        made = table()
        optimizer = optimizer_class(
            made.parameters(), lr=0.1, l2=0.1, rows=rows, on_nonfinite="skip_row"
        )
        (made(torch.tensor(ids)) * torch.tensor(factors)[:, None]).sum().backward()
        counts = {}
        if dense:
            made.weight.grad = made.weight.grad.to_dense()
            counts = {made.weight: torch.bincount(torch.tensor(ids), minlength=20)}
        optimizer.step(counts=counts)
        results.append(made.weight.detach())
    torch.testing.assert_close(*results)
