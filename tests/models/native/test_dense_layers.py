"""ReLU layers and the C++ passes over activations against plain torch in float64."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from stampede.models import NetworkShape, NoOptions, StoredColumns, native, network
from stampede.models.fm import joined_with_second_order, second_order
from stampede.models.mlp import MLP, HiddenLayers, hidden_layers
from stampede.models.relu_layers import relu_layers
from stampede.native import switched_off

PRECISIONS = {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 2e-2)}


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    assert native.computing_dtype(torch.zeros(1)) == torch.float32


def autocast(precision):
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def assert_near(found, exact, precision):
    # A rounding is as large as what was rounded, which sums of it need not be.
    largest = exact.abs().max().item() if exact.numel() else 0.0
    tolerance = PRECISIONS[precision][1]
    torch.testing.assert_close(
        found.double(), exact.double(), rtol=tolerance, atol=tolerance * max(largest, 1e-6)
    )


def rounded(tensor, precision):
    """Values that the products take as they are."""
    return tensor.to(PRECISIONS[precision][0]).float()


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


@settings(max_examples=60, deadline=None)
@given(
    samples=st.sampled_from([0, 1, 63, 64, 65, 300]),
    fields=st.integers(1, 7),
    dim=st.integers(1, 40),
    numbers=st.sampled_from([0, 1, 13, 16, 17]),
    precision=st.sampled_from(list(PRECISIONS)),
    seed=st.integers(0, 2**31),
)
def test_inputs_and_interactions_of_stored_rows(samples, fields, dim, numbers, precision, seed):
    draw = torch.Generator().manual_seed(seed)
    columns = StoredColumns(dim)
    stored = torch.randn(samples, fields, columns.stored, generator=draw).requires_grad_()
    given = torch.randn(samples, numbers, generator=draw)
    to_joined = rounded(torch.randn(samples, fields * dim + numbers, generator=draw), precision)
    to_each = torch.randn(samples, generator=draw)
    with autocast(precision):
        embeddings, first_order = columns.split(stored)
        joined, interaction = joined_with_second_order(embeddings, given)
    assert joined.dtype == PRECISIONS[precision][0] and interaction.dtype == torch.float32
    assert "_JoinedWithSecondOrder" in joined.grad_fn.name()
    assert "_Split" in first_order.grad_fn.name()
    firsts = first_order.squeeze(-1).sum(1)
    loss = (joined * to_joined.to(joined.dtype)).float().sum()
    (loss + (interaction * to_each).sum() + (firsts * to_each).sum()).backward()

    exact = stored.detach().double().requires_grad_()
    e = exact[..., :dim]
    all_pairs = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1)
    inputs = torch.cat([e.flatten(1), given.double()], 1)
    total = (inputs * to_joined).sum() + ((all_pairs + exact[..., dim].sum(1)) * to_each).sum()
    total.backward()
    assert torch.equal(joined.float(), rounded(inputs.detach().float(), precision))
    assert_near(interaction.detach(), all_pairs.detach(), "fp32")
    assert_near(stored.grad, exact.grad, "fp32")


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
        joined, interaction = joined_with_second_order(inputs[:, :, None], torch.zeros(5, 0))
    assert joined.dtype == PRECISIONS[precision][0]
    output.float().backward(torch.tensor([[1.0], [2.0], [float("nan")], [4.0], [5.0]]))
    found = output.detach().float().flatten()
    # Tiles make NaN of infinite factors of float32 products.
    assert found[[0, 3]].tolist() == [1.0, 0.0] and found[1].isnan()
    assert not found[2].isfinite() and (found[4] == 0 or found[4].isnan())
    expected = torch.tensor([1.0, 2.0, float("nan"), 0.0])
    torch.testing.assert_close(inputs.grad.flatten()[:4], expected, equal_nan=True)
    torch.testing.assert_close(joined.detach().float(), inputs.detach(), equal_nan=True)
    assert interaction[1].isnan()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_kept_graph_can_be_gone_through_again(precision):
    mlp = MLP(6, [5, 4, 3], torch.Generator().manual_seed(0))
    inputs = torch.randn(70, 6)
    given = inputs.clone()
    with autocast(precision):
        logits = mlp(inputs.requires_grad_())
    logits.sum().backward(retain_graph=True)
    once = [inputs.grad.clone(), *(parameter.grad.clone() for parameter in mlp.parameters())]
    logits.sum().backward()
    twice = [inputs.grad, *(parameter.grad for parameter in mlp.parameters())]
    for one, other in zip(once, twice, strict=True):
        torch.testing.assert_close(2 * one, other)
    assert torch.equal(inputs, given)
    with pytest.raises(RuntimeError, match="second time"):
        logits.sum().backward()


def mlp_and_inputs():
    return MLP(6, [5, 4, 3], torch.Generator().manual_seed(0)), torch.randn(70, 6).requires_grad_()


def test_gradients_of_a_batch_of_outputs():
    mlp, inputs = mlp_and_inputs()
    each = torch.stack(
        [torch.autograd.grad(mlp(inputs)[row], inputs)[0] for row in range(len(inputs))]
    )
    together = torch.autograd.grad(mlp(inputs), inputs, torch.eye(70), is_grads_batched=True)
    torch.testing.assert_close(together[0], each)


def test_a_backward_that_failed_cannot_be_repeated(monkeypatch):
    mlp, inputs = mlp_and_inputs()
    logits = mlp(inputs).sum()

    def fail(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr(native, "transposed_product", fail)
    with pytest.raises(MemoryError):
        logits.backward()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.backward()


@pytest.mark.parametrize("function", ["mlp", "joined", "split", "second order"])
def test_a_gradient_that_is_to_be_differentiated_is_refused(function):
    mlp, inputs = mlp_and_inputs()
    embeddings = inputs.view(70, 2, 3)
    outcome = {
        "mlp": lambda: mlp(inputs),
        "joined": lambda: joined_with_second_order(embeddings, torch.zeros(70, 0))[0],
        "split": lambda: StoredColumns(2).split(embeddings)[0],
        "second order": lambda: second_order(embeddings),
    }[function]()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(outcome.sum(), inputs, create_graph=True)


@settings(max_examples=60, deadline=None)
@given(
    trained=st.lists(st.booleans(), min_size=8, max_size=8).filter(any),
    precision=st.sampled_from(list(PRECISIONS)),
)
def test_gradients_of_what_is_trained_only(trained, precision):
    mlp, inputs = mlp_and_inputs()
    with autocast(precision):
        mlp(inputs).float().sum().backward()
    everything = [inputs, *mlp.parameters()]
    expected = [tensor.grad for tensor in everything]
    for tensor, is_trained in zip(everything, trained, strict=True):
        tensor.requires_grad_(is_trained)
        tensor.grad = None
    with autocast(precision):
        mlp(inputs).float().sum().backward()
    for tensor, is_trained, was in zip(everything, trained, expected, strict=True):
        assert torch.equal(tensor.grad, was) if is_trained else tensor.grad is None


class _Doubled(HiddenLayers):
    def forward(self, input):
        return 2 * super().forward(input)


def changed(mlp, how):
    """Replace a part of an MLP 6-5-4-3-1."""
    if how == "bias":
        mlp.output = nn.Linear(3, 1)
    elif how == "subclass":
        mlp.hidden = _Doubled(6, [5, 4, 3])
    elif how == "another module":
        mlp.hidden = nn.Linear(6, 3)
    elif how == "sigmoid":
        mlp.hidden = HiddenLayers(6, [5, 4, 3], activation=torch.sigmoid)
    elif how == "no biases":
        mlp.hidden = HiddenLayers(6, [5, 4, 3], bias=False)
    elif how == "no layers":
        mlp.hidden, mlp.output = HiddenLayers(6, []), nn.Linear(6, 1, bias=False)
    elif how == "no list of layers":
        mlp.hidden._mlp = nn.Linear(6, 3)
    elif how == "forward of the output":
        mlp.output.forward = lambda inputs: 3 * functional.linear(inputs, mlp.output.weight)
    elif how == "hook of the output":
        mlp.output.register_forward_hook(lambda _, __, output: 3 * output)
    elif how == "hook of the layers":
        mlp.hidden.register_forward_hook(lambda _, __, output: 3 * output)


@pytest.mark.parametrize(
    "how",
    ["bias", "subclass", "another module", "sigmoid", "no biases", "no layers",
     "no list of layers", "forward of the output", "hook of the output", "hook of the layers"],
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


def test_a_bias_of_another_dtype_goes_with_autocast():
    mlp, inputs = mlp_and_inputs()
    mlp.hidden._mlp[0]._linear.bias = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    with autocast("bf16"):
        mlp(inputs).float().sum().backward()
    assert mlp.hidden._mlp[0]._linear.bias.grad.dtype == torch.bfloat16


def test_second_derivatives_of_the_second_order():
    given = torch.randn(3, 2, 4).double()
    found = torch.func.hessian(lambda e: second_order(e).sum())(given)
    exact = torch.func.hessian(lambda e: (e[:, 0] * e[:, 1]).sum())(given)
    torch.testing.assert_close(found, exact)


def test_hooks_of_all_modules_are_called():
    mlp, inputs = mlp_and_inputs()
    seen = []
    with torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module))
    ):
        mlp(inputs)
    assert seen.count(nn.Linear) == 4


def test_operations_that_are_watched_are_torchs():
    mlp, inputs = mlp_and_inputs()
    expected = mlp(inputs)
    with FlopCounterMode(display=False) as counter:
        mlp(inputs)
    assert counter.get_total_flops() == 2 * 70 * (6 * 5 + 5 * 4 + 4 * 3 + 3)
    graph = make_fx(lambda given: mlp(given))(inputs)
    torch.testing.assert_close(graph(inputs), expected)
    with pytest.raises(RuntimeError, match="meta"):
        MLP(6, [5], torch.Generator()).to("meta")(inputs)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_gradients_the_bits_are_torchs(precision):
    mlp, inputs = mlp_and_inputs()
    with autocast(precision), torch.no_grad():
        found = mlp(inputs)
        with switched_off():
            assert torch.equal(found, mlp(inputs))
    with autocast(precision):
        assert mlp(inputs).dtype == found.dtype


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_layers_gave_is_not_overwritten(precision):
    layers = hidden_layers(6, [5, 4], torch.Generator().manual_seed(0))
    with autocast(precision):
        output = layers(torch.randn(70, 6))
    before = output.detach().clone()
    output.float().sum().backward()
    assert torch.equal(output.detach(), before)


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


def test_plain_torch_does_the_same_where_the_kernels_cannot():
    layers = hidden_layers(6, [5, 4], torch.Generator().manual_seed(0))
    inputs = torch.randn(3, 6)
    found = layers(inputs)
    with switched_off():
        assert native.computing_dtype(inputs) is None
        torch.testing.assert_close(layers(inputs), found)
        embeddings = torch.randn(3, 2, 4, requires_grad=True)
        joined, interaction = joined_with_second_order(embeddings, inputs)
    torch.testing.assert_close(interaction, second_order(embeddings))
    assert torch.equal(joined, torch.cat([embeddings.flatten(1), inputs], 1))
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


def test_hooks_of_a_layer_are_called():
    layers = hidden_layers(6, [5, 4], torch.Generator().manual_seed(0))
    inputs, seen = torch.randn(3, 6), []
    expected = layers(inputs)
    layers._mlp[1]._linear.register_forward_hook(lambda *_: seen.append("linear"))
    layers._mlp[0].register_forward_hook(lambda *_: seen.append("layer"))
    torch.testing.assert_close(layers(inputs), expected)
    assert seen == ["layer", "linear"]
    layers._mlp[1]._linear = torch.nn.utils.parametrizations.weight_norm(layers._mlp[1]._linear)
    torch.testing.assert_close(layers(inputs), expected)
