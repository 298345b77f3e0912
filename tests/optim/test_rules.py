"""The base optimizers against torch's own; test_update.py has those that torch lacks."""

import pytest
import torch

from stampede.optim.rules import SGD, Adagrad, Adam, RowGradientSquares, RowStep

LR = 0.03


def gradients(rows=5, dim=4, steps=6):
    """Rows over four decades, one of them zero throughout."""
    draw = torch.Generator().manual_seed(0)
    scale = 10.0 ** -torch.arange(rows, dtype=torch.float64)[:, None]
    scale[2] = 0.0
    return [
        torch.randn(rows, dim, generator=draw, dtype=torch.float64) * scale for _ in range(steps)
    ]


def train(rule, grads):
    """Weights and states after the steps, starting from ones."""
    rows, dim = grads[0].shape
    shapes = rule.state_shapes(rows, dim, has_rest=False)
    states = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    weights = torch.ones(rows, dim, dtype=torch.float64)
    for step, grad in enumerate(grads, 1):
        squares = RowGradientSquares(grad.square().sum(1), torch.zeros(rows), dim, dim)
        rule.step_(RowStep(weights, grad.clone(), states, squares, LR, step))
    return weights, states


@pytest.mark.parametrize(
    "rule, theirs",
    [
        (
            Adam(betas=(0.8, 0.99), eps=1e-3, eps_placement="torch"),
            lambda p: torch.optim.Adam(p, lr=LR, betas=(0.8, 0.99), eps=1e-3),
        ),
        (
            Adam(eps_placement="torch"),
            lambda p: torch.optim.Adam(p, lr=LR, eps=1e-7),
        ),
        (Adagrad(eps=1e-3), lambda p: torch.optim.Adagrad(p, lr=LR, eps=1e-3)),
        (SGD(), lambda p: torch.optim.SGD(p, lr=LR)),
        (SGD(momentum=0.9), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    ],
    ids=lambda value: None if callable(value) else repr(value),
)
def test_follows_torch(rule, theirs):
    grads = gradients()
    parameter = torch.nn.Parameter(torch.ones_like(grads[0]))
    optimizer = theirs([parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    weights, states = train(rule, grads)
    torch.testing.assert_close(weights, parameter.data)
    for name, state in states.items():
        torch.testing.assert_close(state, optimizer.state[parameter][name])
