"""Adam of the dense layers against the equations and against torch."""

import math

import pytest
import torch
from torch import nn

from stampede.optim import DenseAdam


def gradients(steps):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(7, generator=draw) * 10.0**-step for step in range(steps)]


def test_keras_placement_of_eps():
    weight = nn.Parameter(torch.ones(7))
    optimizer = DenseAdam([weight], lr=0.1, l2=1e-2, eps=1e-3)
    w, m, v = (torch.full((7,), x, dtype=torch.float64) for x in (1.0, 0.0, 0.0))
    for t, grad in enumerate(gradients(5), 1):
        weight.grad = grad
        optimizer.step()
        g = grad.double() + 2e-2 * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 0.1 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (v.sqrt() + 1e-3)
        torch.testing.assert_close(weight.double(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_weight_decay_is_that_of_adamw(rate):
    ours, theirs = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7))
    optimizer = DenseAdam([ours], lr=rate, eps=1e-3, eps_placement="torch", weight_decay=0.3)
    peer = torch.optim.AdamW([theirs], lr=rate, eps=1e-3, weight_decay=0.3)
    for grad in gradients(5):
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step(found_inf=torch.zeros(1))
        peer.step()
    torch.testing.assert_close(ours, theirs)


def test_nothing_decays_in_a_step_that_is_left_out():
    weight = nn.Parameter(torch.ones(7))
    optimizer = DenseAdam([weight], lr=0.1, weight_decay=0.3)
    weight.grad = torch.full((7,), float("nan"))
    optimizer.step(found_inf=torch.ones(1))
    assert torch.equal(weight.detach(), torch.ones(7))
