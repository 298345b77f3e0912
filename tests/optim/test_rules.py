"""The base optimizers against torch's own, and against a formula where torch has none."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_adam_with_keras_epsilon():
    """w -= lr * sqrt(1-b2^t)/(1-b1^t) * m / (sqrt(v) + eps), epsilon before the correction."""
    grads = gradients()
    rule = Adam(betas=(0.8, 0.99), eps=1e-2)
    weights, m, v = (torch.full_like(grads[0], value) for value in (1.0, 0.0, 0.0))
    for t, g in enumerate(grads, 1):
        m, v = 0.8 * m + 0.2 * g, 0.99 * v + 0.01 * g * g
        weights -= LR * math.sqrt(1 - 0.99**t) / (1 - 0.8**t) * m / (v.sqrt() + 1e-2)
    found, states = train(rule, grads)
    torch.testing.assert_close(found, weights)
    torch.testing.assert_close(states["exp_avg_sq"], v)
    other, _ = train(Adam(betas=(0.8, 0.99), eps=1e-2, eps_placement="torch"), grads)
    assert (other - found).abs().max() > 0.1 * (found - 1.0).abs().max()


def test_torch_eps():
    assert Adam((0.9, 0.999), 1e-7, "torch").torch_eps(3) == 1e-7
    assert Adam((0.9, 0.75), 1e-7).torch_eps(2) == pytest.approx(1e-7 / math.sqrt(1 - 0.75**2))


@pytest.mark.parametrize("width", [4, 3, 2])
def test_row_wise_adagrad(width):
    """s += mean over the row's clipped columns of g*g; the others share a sum of their own."""
    grads = gradients()
    sums, rest = torch.zeros(5, 1, dtype=torch.float64), torch.zeros(5, 1, dtype=torch.float64)
    weights = torch.ones_like(grads[0])
    for g in grads:
        sums += g[:, :width].square().mean(1, keepdim=True)
        rest += g[:, width:].square().sum(1, keepdim=True)
        weights[:, :width] -= LR * g[:, :width] / (sums.sqrt() + 1e-3)
        weights[:, width:] -= LR * g[:, width:] / (rest.sqrt() + 1e-3)
    found, states = train(RowWiseAdagrad(eps=1e-3), grads, width)
    torch.testing.assert_close(found, weights)
    torch.testing.assert_close(states["sum"], sums[:, 0])


@pytest.mark.parametrize("width", [4, 3, 2])
@pytest.mark.parametrize("eps_placement", ["keras", "torch"])
def test_row_wise_adam(width, eps_placement):
    """v = b2*v + (1-b2)*mean(g*g) over the row's clipped columns, m as in Adam."""
    grads = gradients()
    b1, b2, eps = 0.8, 0.99, 1e-3
    weights, m = torch.ones_like(grads[0]), torch.zeros_like(grads[0])
    v = torch.zeros_like(m)
    for t, g in enumerate(grads, 1):
        square = torch.empty_like(g)
        square[:, :width] = g[:, :width].square().mean(1, keepdim=True)
        square[:, width:] = g[:, width:].square().sum(1, keepdim=True)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * square
        if eps_placement == "keras":
            step = math.sqrt(1 - b2**t) / (1 - b1**t) * m / (v.sqrt() + eps)
        else:
            step = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps)
        weights -= LR * step
    rule = RowWiseAdam(betas=(b1, b2), eps=eps, eps_placement=eps_placement)
    found, states = train(rule, grads, width)
    torch.testing.assert_close(found, weights)
    torch.testing.assert_close(states["exp_avg"], m)
    torch.testing.assert_close(states["exp_avg_sq"], v[:, 0])


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


@settings(max_examples=25, deadline=None)
@given(
    rule=st.sampled_from([RowWiseAdam(), RowWiseAdagrad()]),
    dim=st.integers(1, 8),
    cut=st.integers(1, 7),
    width=st.integers(1, 8),
)
def test_column_shards_step_as_the_whole(rule, dim, cut, width):
    """Given the squares over all columns, each shard moves its own as the whole table would."""
    width, cut = min(width, dim), min(cut, dim)
    grads = gradients(dim=dim)
    whole, _ = train(rule, grads, width)
    for columns in (slice(0, cut), slice(cut, dim)):
        if columns.start == columns.stop:
            continue
        local = min(max(width - columns.start, 0), columns.stop - columns.start)
        part = torch.ones_like(grads[0])[:, columns]
        shapes = rule.state_shapes(*part.shape, has_rest=width < dim)
        states = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        for step, grad in enumerate(grads, 1):
            squares = RowGradientSquares(
                grad[:, :width].square().sum(1), grad[:, width:].square().sum(1), width, local
            )
            rule.step_(RowStep(part, grad[:, columns].clone(), states, squares, LR, step))
        torch.testing.assert_close(part, whole[:, columns])


@pytest.mark.parametrize(
    "rule, per_row",
    [
        # Numbers of state for a row of 12 columns.
        (Adam(), {"exp_avg": 12, "exp_avg_sq": 12}),
        (RowWiseAdam(), {"exp_avg": 12, "exp_avg_sq": 1}),
        (Adagrad(), {"sum": 12}),
        (RowWiseAdagrad(), {"sum": 1}),
        (SGD(), {}),
        (SGD(momentum=0.5), {"momentum_buffer": 12}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("has_rest", [False, True])
def test_memory_of_the_states(rule, per_row, has_rest):
    if has_rest:
        per_row = per_row | {f"{name}_rest": 1 for name, numbers in per_row.items() if numbers == 1}
    shapes = rule.state_shapes(1000, 12, has_rest=has_rest)
    assert {name: math.prod(shape) for name, shape in shapes.items()} == {
        name: 1000 * numbers for name, numbers in per_row.items()
    }


@pytest.mark.parametrize(
    "rule, moves",
    [
        (Adam(), True),
        (RowWiseAdam(), True),
        (Adagrad(), False),
        (RowWiseAdagrad(), False),
        (SGD(), False),
        (SGD(momentum=0.5), True),
    ],
    ids=repr,
)
def test_whether_momentum_carries_a_row_on(rule, moves):
    grads = gradients()
    assert rule.moves_without_gradient is moves
    before, _ = train(rule, grads[:1])
    after, _ = train(rule, [grads[0], torch.zeros_like(grads[0])])
    assert bool((after != before).any()) is moves


def test_rules_are_hashable_and_equal_by_value():
    assert len({Adam(), Adam(), RowWiseAdam(), Adagrad(), RowWiseAdagrad(), SGD(), SGD(0.5)}) == 6
