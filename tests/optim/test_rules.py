"""The base optimizers and DenseAdam against torch's own; test_update.py has those it lacks."""

import math

import pytest
import torch
from torch import nn

from stampede.optim import DenseAdam
from stampede.optim.rules import SGD, Adagrad, Adam, RowGradientSquares, RowStep

LR = 0.03


def gradients(rows=5, dim=4, steps=6):
    """Rows over four decades, one of them zero throughout."""
    draw = torch.Generator().manual_seed(0)
    scale = 10.0 ** -torch.arange(rows, dtype=torch.float64)[:, None]
    scale[2] = 0.0
    drawn = torch.randn(steps, rows, dim, generator=draw, dtype=torch.float64)
    return list(drawn * scale)


def train(rule, grads):
    """Weights and states after the steps, starting from ones."""
    rows, dim = grads[0].shape
    shapes = rule.state_shapes(rows, dim, has_rest=False)
    states = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    weights = torch.ones(rows, dim, dtype=torch.float64)
    for step, grad in enumerate(grads, 1):
        squares = RowGradientSquares(grad.square().sum(1), torch.zeros(rows), dim, dim)
        rule.step_(RowStep(weights, grad.clone(), torch.ones(len(grad)), states, squares, LR, step))
    return weights, states


@pytest.mark.parametrize(
    "rule, theirs",
    [
        (
            Adam(betas=(0.8, 0.99), eps=1e-3, eps_placement="torch"),
            lambda p: torch.optim.Adam(p, lr=LR, betas=(0.8, 0.99), eps=1e-3),
        ),
        (Adam(eps_placement="torch"), lambda p: torch.optim.Adam(p, lr=LR, eps=1e-7)),
        (Adagrad(eps=1e-3), lambda p: torch.optim.Adagrad(p, lr=LR, eps=1e-3)),
        (SGD(), lambda p: torch.optim.SGD(p, lr=LR)),
        (SGD(momentum=0.9), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    ],
    ids=lambda value: None if callable(value) else repr(value),
)
def test_follows_torch(rule, theirs):
    grads = gradients()
    parameter = nn.Parameter(torch.ones_like(grads[0]))
    optimizer = theirs([parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    weights, states = train(rule, grads)
    torch.testing.assert_close(weights, parameter.data)
    for name, state in states.items():
        torch.testing.assert_close(state, optimizer.state[parameter][name])


def test_dense_adam_has_eps_where_keras_has_it():
    weight = nn.Parameter(torch.ones(5, 4))
    optimizer = DenseAdam([weight], lr=0.1, l2=1e-2, eps=1e-3)
    w, m, v = (torch.full((5, 4), x, dtype=torch.float64) for x in (1.0, 0.0, 0.0))
    for t, grad in enumerate(gradients(), 1):
        weight.grad = grad.float()
        optimizer.step()
        g = grad + 2e-2 * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 0.1 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (v.sqrt() + 1e-3)
        torch.testing.assert_close(weight.double(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_dense_adam_decays_as_adamw_and_not_in_a_step_that_is_left_out(rate):
    ours, theirs = nn.Parameter(torch.ones(5, 4)), nn.Parameter(torch.ones(5, 4))
    optimizer = DenseAdam([ours], lr=rate, eps=1e-3, eps_placement="torch", weight_decay=0.3)
    peer = torch.optim.AdamW([theirs], lr=rate, eps=1e-3, weight_decay=0.3)
    for grad in gradients():
        ours.grad, theirs.grad = grad.float(), grad.float()
        optimizer.step(found_inf=torch.zeros(1))
        peer.step()
    torch.testing.assert_close(ours, theirs)
    before = ours.detach().clone()
    ours.grad = torch.full((5, 4), float("nan"))
    optimizer.step(found_inf=torch.ones(1))
    assert torch.equal(ours, before)
