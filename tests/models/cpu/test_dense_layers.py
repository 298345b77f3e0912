"""ReLU layers and the C++ passes over activations against plain torch in float64."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stampede.models import StoredColumns
from stampede.models.mlp import relu_layers
from support.dense import PRECISIONS, assert_near, autocast, rounded


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 63, 64, 65, 200, 1100]),
    widths=st.lists(st.integers(1, 60), min_size=2, max_size=4),
    has_output=st.booleans(),
    precision=st.sampled_from(list(PRECISIONS)),
    seed=st.integers(0, 2**31),
)
def test_relu_layers(rows, widths, has_output, precision, seed):
    draw = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    output = nn.Linear(widths[-1], 1, bias=False) if has_output else None
    with torch.no_grad():
        # Of one sign, so that nothing cancels and a rounding does not decide what a ReLU does.
        for module in (*layers, *([output] if has_output else [])):
            for parameter in module.parameters():
                values = torch.rand(parameter.shape, generator=draw) / parameter.shape[-1]
                parameter.copy_(rounded(values, precision))
        if rows > 1:
            layers[-1].weight[0] *= -1.0
            layers[-1].bias[0] = -1.0
    inputs = rounded(torch.rand(rows, widths[0], generator=draw), precision).requires_grad_()
    grad = rounded(torch.rand(rows, 1 if has_output else widths[-1], generator=draw), precision)
    with autocast(precision):
        found = relu_layers(inputs, layers, output)
    assert "_ReluLayers" in found.grad_fn.name()
    found.backward(grad.to(found.dtype))
    modules = nn.ModuleList([*layers, *([output] if has_output else [])])
    ours = [inputs.grad, *(parameter.grad for parameter in modules.parameters())]
    assert all(one.dtype == torch.float32 for one in ours)

    wide = copy.deepcopy(modules).double()
    wide.zero_grad()
    exact = x = inputs.detach().double().requires_grad_()
    for layer in wide[: len(layers)]:
        exact = torch.relu(layer(exact))
    exact = wide[-1](exact) if has_output else exact
    exact.backward(grad.double())
    assert_near(found.detach(), exact.detach(), precision)
    for one, other in zip(
        ours, [x.grad, *(parameter.grad for parameter in wide.parameters())], strict=True
    ):
        assert_near(one, other, precision)


@pytest.mark.parametrize("uses", ["embeddings", "first order", "embeddings transposed"])
def test_the_gradient_of_rows_of_which_a_part_is_used(uses):
    rows = torch.randn(70, 3, 8, requires_grad=True)

    def loss(embeddings, first_order):
        if uses == "embeddings":
            return embeddings.sum()
        if uses == "first order":
            return (first_order**2).sum()
        return (embeddings.transpose(0, 2).contiguous() ** 2).sum()

    loss(*StoredColumns(5).split(rows)).backward()
    found, rows.grad = rows.grad, None
    loss(rows[..., :5], rows[..., 5:6]).backward()
    assert torch.equal(found, rows.grad)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nan_and_infinity_are_passed_on(precision):
    inputs = torch.tensor([[1.0], [float("nan")], [float("inf")], [-1.0], [float("-inf")]])
    inputs.requires_grad_()
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
    with autocast(precision):
        output = relu_layers(inputs, [layer])
    output.float().backward(torch.tensor([[1.0], [2.0], [float("nan")], [4.0], [5.0]]))
    found = output.detach().float().flatten()
    # Tiles make NaN of infinite factors of float32 products.
    assert found[[0, 3]].tolist() == [1.0, 0.0] and found[1].isnan()
    assert not found[2].isfinite() and (found[4] == 0 or found[4].isnan())
    expected = torch.tensor([1.0, 2.0, float("nan"), 0.0])
    torch.testing.assert_close(inputs.grad.flatten()[:4], expected, equal_nan=True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_inputs_may_lie_in_memory_as_they_like(precision):
    whole = rounded(torch.randn(20, 9), precision)
    layer = nn.Linear(6, 3)

    def outcome(inputs):
        layer.zero_grad()
        with autocast(precision):
            output = relu_layers(inputs, [layer])
        output.float().square().sum().backward()
        return output.detach(), layer.weight.grad

    for inputs in (whole[:, 2:8], whole.t().contiguous().t()[:, :6]):
        for wide in (inputs, inputs.to(PRECISIONS[precision][0])):
            for one, other in zip(outcome(wide), outcome(inputs.contiguous()), strict=True):
                torch.testing.assert_close(one, other)
