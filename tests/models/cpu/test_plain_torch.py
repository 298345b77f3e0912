"""Where plain torch computes instead of the kernels."""

from importlib import import_module

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from stampede.models import NetworkShape, NoOptions, cpu, network
from stampede.models.mlp import MLP, HiddenLayers, hidden_layers
from stampede.native_library import switched_off
from support.dense import PRECISIONS, autocast, mlp_and_inputs


class _Doubled(HiddenLayers):
    def forward(self, input):
        return 2 * super().forward(input)


def changed(mlp, how):
    """Replace a part of an MLP 6-5-4-3-1."""
    if how == "bias":
        mlp.output = nn.Linear(3, 1)
    elif how == "subclass":
        mlp.hidden = _Doubled(6, [5, 4, 3])
    elif how == "sigmoid":
        mlp.hidden = HiddenLayers(6, [5, 4, 3], activation=torch.sigmoid)
    elif how == "no layers":
        mlp.hidden, mlp.output = HiddenLayers(6, []), nn.Linear(6, 1, bias=False)
    elif how == "forward of the output":
        mlp.output.forward = lambda inputs: 3 * functional.linear(inputs, mlp.output.weight)
    elif how == "hook of the output":
        mlp.output.register_forward_hook(lambda _, __, output: 3 * output)
    elif how == "hook of the layers":
        mlp.hidden.register_forward_hook(lambda _, __, output: 3 * output)


@pytest.mark.parametrize(
    "how",
    ["bias", "subclass", "sigmoid", "no layers", "forward of the output", "hook of the output",
     "hook of the layers"],
)  # fmt: skip
def test_what_was_put_into_a_network_is_called(how):
    mlp, inputs = mlp_and_inputs()
    changed(mlp, how)
    before = inputs.detach().clone()
    found = mlp(inputs)
    found.sum().backward()
    hidden, output = mlp.hidden, mlp.output
    with switched_off():
        expected = output(hidden(inputs)).squeeze(1)
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


@pytest.mark.parametrize("precision", PRECISIONS)
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


def test_other_ways_to_look_into_a_network():
    shape = NetworkShape(2, 4, 6, (5,))
    deepfm = network("deepfm").build(shape, torch.Generator().manual_seed(0), NoOptions())
    given = torch.randn(3, 2, 4), torch.randn(3, 6)
    expected = deepfm(*given)
    torch.testing.assert_close(torch.fx.symbolic_trace(deepfm)(*given), expected)
    torch.testing.assert_close(torch.jit.trace(deepfm, given)(*given), expected)
    grad = torch.func.grad(lambda embeddings: deepfm(embeddings, given[1]).sum())(given[0])
    embeddings = given[0].clone().requires_grad_()
    deepfm(embeddings, given[1]).sum().backward()
    torch.testing.assert_close(grad, embeddings.grad)


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
