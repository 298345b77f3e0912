"""Schedulers, and learning rates of any kind."""

import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from stampede.optim import (
    CowClipAdagrad,
    CowClipAdam,
    CowClipRowWiseAdagrad,
    CowClipSGD,
)
from support.one_table import EVERY_CLASS, table, train


@pytest.mark.parametrize(
    "make, lrs",
    [
        (lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5), [1.0, 0.5, 0.25]),
        (lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)), [1.0, 1 / 2, 1 / 3]),
        (
            lambda o: lr_scheduler.SequentialLR(
                o,
                [
                    lr_scheduler.LinearLR(o, 0.5, total_iters=1),
                    lr_scheduler.ExponentialLR(o, 0.1),
                ],
                [1],
            ),
            [0.5, 1.0, 0.1],
        ),
    ],
)
def test_schedulers_drive_the_learning_rate(make, lrs):
    made = table()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # "lr_scheduler.step() before ..."
        optimizer = CowClipSGD(made.parameters(), lr=1.0, clip=None)
        scheduler = make(optimizer)
        for lr in lrs:
            before = made.weight.detach().clone()
            optimizer.zero_grad()
            made(torch.tensor([3])).sum().backward()
            optimizer.step()
            scheduler.step()
            moved = (before - made.weight.detach())[3]
            torch.testing.assert_close(moved, torch.full((4,), lr), rtol=1e-5, atol=1e-6)


@EVERY_CLASS
def test_schedulers_that_cycle_momentum_work(optimizer_class):
    made = table()
    optimizer = optimizer_class(made.parameters(), lr=0.1)
    cycles = optimizer_class not in (CowClipAdagrad, CowClipRowWiseAdagrad)
    train(made, optimizer, 1)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5, cycle_momentum=cycles)
    for step in range(4):
        train(made, optimizer, 1, first=step)
        scheduler.step()
    assert made.weight.isfinite().all()


def test_a_learning_rate_in_a_tensor_works():
    one, other = table(), table()
    for made, lr in ((one, 0.1), (other, torch.tensor(0.1, dtype=torch.float64))):
        train(made, CowClipAdam(made.parameters(), lr=lr), 2)
    assert torch.equal(one.weight, other.weight)


def test_a_learning_rate_that_becomes_nan_is_refused():
    made = table()
    optimizer = CowClipAdam(made.parameters())
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr is nan"):
        train(made, optimizer, 1)
