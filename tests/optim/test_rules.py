"""The base optimizers against torch's own, and against a formula where torch has none."""

import pytest
import torch

from stampede.optim.rules import (
    SGD,
    Adagrad,
    Adam,
    RowGradientSquares,
    RowStep,
    RowWiseAdagrad,
    RowWiseAdam,
)

LR = 0.03
STEPS = 6


def gradients(rows=5, dim=4, steps=STEPS):
    """Rows over four decades, one of them zero throughout."""
    draw = torch.Generator().manual_seed(0)
    scale = 10.0 ** -torch.arange(rows, dtype=torch.float64)[:, None]
    scale[2] = 0.0
    return [
        torch.randn(rows, dim, generator=draw, dtype=torch.float64) * scale for _ in range(steps)
    ]


def train(rule, grads, width=None):
    """Weights and states after the steps, starting from ones."""
    rows, dim = grads[0].shape
    width = dim if width is None else width
    shapes = rule.state_shapes(rows, dim, has_rest=width < dim)
    states = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    weights = torch.ones(rows, dim, dtype=torch.float64)
    for step, grad in enumerate(grads, 1):
        squares = RowGradientSquares(
            grad[:, :width].square().sum(1), grad[:, width:].square().sum(1), width, width
        )
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


@pytest.mark.parametrize(
    "row_wise, element_wise", [(RowWiseAdam(), Adam()), (RowWiseAdagrad(), Adagrad())]
)
def test_row_wise_of_one_column_is_element_wise(row_wise, element_wise):
    grads = gradients(dim=1)
    torch.testing.assert_close(train(row_wise, grads)[0], train(element_wise, grads)[0])
    # A single column beside the clipped ones, a first-order weight, is so too.
    beside = gradients(dim=4)
    one, other = train(row_wise, beside, 3)[0], train(element_wise, beside)[0]
    torch.testing.assert_close(one[:, 3], other[:, 3])


def test_rules_are_hashable_and_equal_by_value():
    assert len({Adam(), Adam(), RowWiseAdam(), Adagrad(), RowWiseAdagrad(), SGD(), SGD(0.5)}) == 6
