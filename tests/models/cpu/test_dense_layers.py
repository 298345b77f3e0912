"""ReLU layers in C++ against plain torch in float64, and where plain torch computes instead."""

import copy
import itertools
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from stampede.models import NetworkShape, StoredColumns, cpu
from stampede.models.fm_terms import joined_with_orders, second_order
from stampede.models.mlp import MLP, HiddenLayers, hidden_layers, relu_layers
from stampede.native_library import switched_off
from support.dense import PRECISIONS, assert_near, autocast, rounded

EACH_PRECISION = pytest.mark.parametrize("precision", PRECISIONS)


def mlp_and_inputs():
    mlp = MLP(6, NetworkShape(0, 0, 6, (5, 4, 3)), torch.Generator().manual_seed(0))
    return mlp, torch.randn(70, 6).requires_grad_()


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
    modules = nn.ModuleList([*layers, *([output] if has_output else [])])
    with torch.no_grad():
        # Of one sign, so that nothing cancels and a rounding does not decide what a ReLU does.
        for parameter in modules.parameters():
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
    theirs = [x.grad, *(parameter.grad for parameter in wide.parameters())]
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one, other, precision)


@pytest.mark.parametrize("uses", ["embeddings", "first order", "embeddings transposed"])
def test_the_gradient_of_rows_of_which_a_part_is_used(uses):
    rows = torch.randn(70, 3, 8, requires_grad=True)

    loss = {
        "embeddings": lambda embeddings, _: embeddings.sum(),
        "first order": lambda _, first_order: (first_order**2).sum(),
        "embeddings transposed": lambda e, _: (e.transpose(0, 2).contiguous() ** 2).sum(),
    }[uses]

    loss(*StoredColumns(5).split(rows)).backward()
    found, rows.grad = rows.grad, None
    loss(rows[..., :5], rows[..., 5:6]).backward()
    assert torch.equal(found, rows.grad)


@EACH_PRECISION
def test_a_nan_passes_through_relu_both_ways(precision):
    inputs = torch.tensor([[1.0], [float("nan")], [-1.0], [2.0]], requires_grad=True)
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
    with autocast(precision):
        output = relu_layers(inputs, [layer])
    output.float().backward(torch.tensor([[1.0], [2.0], [3.0], [float("nan")]]))
    found = torch.stack([output.detach().float().flatten(), inputs.grad.flatten()])
    expected = torch.tensor([[1.0, float("nan"), 0.0, 2.0], [1.0, 2.0, 0.0, float("nan")]])
    torch.testing.assert_close(found, expected, equal_nan=True)


@EACH_PRECISION
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
            torch.testing.assert_close(outcome(wide), outcome(inputs.contiguous()))


@EACH_PRECISION
def test_a_kept_graph_can_be_gone_through_again(precision):
    mlp, inputs = mlp_and_inputs()
    given = inputs.detach().clone()
    with autocast(precision):
        logits = mlp(inputs)
    logits.sum().backward(retain_graph=True)
    everything = [inputs, *mlp.parameters()]
    twice = [2 * tensor.grad for tensor in everything]
    logits.sum().backward()
    torch.testing.assert_close([tensor.grad for tensor in everything], twice)
    assert torch.equal(inputs, given)
    with pytest.raises(RuntimeError, match="second time"):
        logits.sum().backward()


@pytest.mark.parametrize("function", ["mlp", "joined", "split", "second order"])
def test_a_gradient_that_is_to_be_differentiated_is_refused(function):
    mlp, inputs = mlp_and_inputs()
    embeddings = inputs.view(70, 2, 3)
    outcome = {
        "mlp": lambda: mlp(inputs),
        "joined": lambda: joined_with_orders(embeddings, 2, torch.zeros(70, 0), None)[0],
        "split": lambda: StoredColumns(2).split(embeddings)[0],
        "second order": lambda: second_order(embeddings),
    }[function]()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(outcome.sum(), inputs, create_graph=True)


@settings(max_examples=20, deadline=None)
@given(
    trained=st.lists(st.booleans(), min_size=8, max_size=8).filter(any),
    precision=st.sampled_from(list(PRECISIONS)),
)
def test_only_trained_tensors_get_gradients(trained, precision):
    mlp, inputs = mlp_and_inputs()
    everything = [inputs, *mlp.parameters()]
    gradients = []
    for which in ([True] * 8, trained):
        for tensor, is_trained in zip(everything, which, strict=True):
            tensor.requires_grad_(is_trained)
            tensor.grad = None
        with autocast(precision):
            mlp(inputs).float().sum().backward()
        gradients.append([tensor.grad for tensor in everything])
    for is_trained, was, found in zip(trained, *gradients, strict=True):
        assert torch.equal(found, was) if is_trained else found is None


class _Doubled(HiddenLayers):
    def forward(self, input):
        return 2 * super().forward(input)


def changed(mlp, how):
    """Replace a part of an MLP 6-5-4-3-1."""
    layers = {
        "subclass": lambda: _Doubled(6, [5, 4, 3]),
        "sigmoid": lambda: HiddenLayers(6, [5, 4, 3], activation=torch.sigmoid),
        "no layers": lambda: HiddenLayers(6, []),
    }
    if how in layers:
        mlp.hidden = layers[how]()
    if how in ("bias", "no layers"):
        mlp.output = nn.Linear(6 if how == "no layers" else 3, 1, bias=how == "bias")
    elif how == "forward of the output":
        mlp.output.forward = lambda inputs: 3 * functional.linear(inputs, mlp.output.weight)
    elif how.startswith("hook of "):
        module = getattr(mlp, how.removeprefix("hook of "))
        module.register_forward_hook(lambda _, __, output: 3 * output)


HOW = ("bias", "subclass", "sigmoid", "no layers", "forward of the output", "hook of output")


@pytest.mark.parametrize("how", [*HOW, "hook of hidden"])
def test_what_was_put_into_a_network_is_called(how):
    mlp, inputs = mlp_and_inputs()
    changed(mlp, how)
    before = inputs.detach().clone()
    found = mlp(inputs)
    found.sum().backward()
    with switched_off():
        expected = mlp.output(mlp.hidden(inputs)).squeeze(1)
    torch.testing.assert_close(found, expected)
    assert torch.equal(inputs, before)


def test_hooks_of_all_modules_are_called():
    mlp, inputs = mlp_and_inputs()
    seen = []
    with torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module))
    ):
        mlp(inputs)
    assert seen.count(nn.Linear) == 4


def test_torch_computes_when_operations_are_watched():
    mlp, inputs = mlp_and_inputs()
    expected = mlp(inputs)
    with FlopCounterMode(display=False) as counter:
        mlp(inputs)
    assert counter.get_total_flops() == 2 * 70 * (6 * 5 + 5 * 4 + 4 * 3 + 3)
    graph = make_fx(lambda given: mlp(given))(inputs)
    torch.testing.assert_close(graph(inputs), expected)
    with pytest.raises(RuntimeError, match="meta"):
        MLP(6, NetworkShape(0, 0, 6, (5,)), torch.Generator()).to("meta")(inputs)


@EACH_PRECISION
def test_without_gradients_the_bits_are_torchs(precision):
    mlp, inputs = mlp_and_inputs()
    with autocast(precision), torch.no_grad():
        found = mlp(inputs)
        with switched_off():
            assert torch.equal(found, mlp(inputs))
    with autocast(precision):
        assert mlp(inputs).dtype == found.dtype


def test_plain_torch_does_the_same_where_the_kernels_cannot():
    layers = hidden_layers(6, [5, 4], torch.Generator().manual_seed(0))
    inputs = torch.randn(3, 6)
    found = layers(inputs)
    with switched_off():
        assert cpu.computing_dtype(inputs) is None
        torch.testing.assert_close(layers(inputs), found)
    # Of other shapes and dtypes than batches of float32.
    torch.testing.assert_close(layers(inputs[None]), found[None])
    assert layers(inputs[:0]).shape == (0, 4)
    assert layers.double()(inputs.double()).dtype == torch.float64


@pytest.mark.parametrize("strict", [True, False])
def test_a_graph_is_captured_without_the_kernels(strict):
    layers = hidden_layers(6, [5], torch.Generator().manual_seed(0))
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(
        layers, (torch.randn(3, 6),), dynamic_shapes=({0: rows},), strict=strict
    )
    assert "stampede" not in str(program.graph)
    inputs = torch.randn(7, 6)
    torch.testing.assert_close(program.module()(inputs), layers(inputs))


@pytest.mark.parametrize("columns", [273, 16])
def test_rows_are_padded_with_zeros_where_a_product_of_them_is_faster(columns, monkeypatch):
    module = import_module("stampede.models.mlp")
    mlp = MLP(columns, NetworkShape(0, 0, columns, (12, 8)), torch.Generator().manual_seed(0))
    inputs = torch.randn(70, columns)
    widths, linear = [], functional.linear

    def noted(rows, weight, bias=None):
        widths.append((rows.shape[1], *weight.shape))
        return linear(rows, weight, bias)

    found = []
    with switched_off():
        for is_faster in (False, True):
            monkeypatch.setattr(module, "_is_aligned_faster", lambda _, faster=is_faster: faster)
            monkeypatch.setattr(functional, "linear", noted)
            mlp.zero_grad()
            given = inputs.clone().requires_grad_()
            logits = mlp(given)
            logits.square().sum().backward()
            found.append([logits.detach(), given.grad, *(p.grad.clone() for p in mlp.parameters())])
    wide = {273: 280}.get(columns, columns)
    assert widths[:3] == [(columns, 12, columns), (12, 8, 12), (8, 1, 8)]
    assert widths[3:] == [(wide, 12, wide), (16, 8, 16), (8, 1, 8)]
    torch.testing.assert_close(*found)
