"""ReLU layers and the C++ passes over activations against plain torch in float64."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stampede.models import StoredColumns, cpu
from stampede.models.fm_terms import joined_with_orders, second_order
from stampede.models.mlp import hidden_layers, relu_layers
from support.dense import PRECISIONS, assert_near, autocast, mlp_and_inputs, rounded


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
def test_a_nan_passes_through_relu_both_ways(precision):
    inputs = torch.tensor([[1.0], [float("nan")], [-1.0], [2.0]], requires_grad=True)
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
    with autocast(precision):
        output = relu_layers(inputs, [layer])
    output.float().backward(torch.tensor([[1.0], [2.0], [3.0], [float("nan")]]))
    torch.testing.assert_close(
        (output.detach().float().flatten(), inputs.grad.flatten()),
        (torch.tensor([1.0, float("nan"), 0.0, 2.0]), torch.tensor([1.0, 2.0, 0.0, float("nan")])),
        equal_nan=True,
    )


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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_kept_graph_can_be_gone_through_again(precision):
    mlp, inputs = mlp_and_inputs()
    given = inputs.detach().clone()
    with autocast(precision):
        logits = mlp(inputs)
    logits.sum().backward(retain_graph=True)
    once = [inputs.grad.clone(), *(parameter.grad.clone() for parameter in mlp.parameters())]
    logits.sum().backward()
    twice = [inputs.grad, *(parameter.grad for parameter in mlp.parameters())]
    for one, other in zip(once, twice, strict=True):
        torch.testing.assert_close(2 * one, other)
    assert torch.equal(inputs, given)
    with pytest.raises(RuntimeError, match="second time"):
        logits.sum().backward()


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

    monkeypatch.setattr(cpu, "transposed_product", fail)
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


def test_second_derivatives_of_the_second_order():
    given = torch.randn(3, 2, 4).double()
    found = torch.func.hessian(lambda e: second_order(e).sum())(given)
    exact = torch.func.hessian(lambda e: (e[:, 0] * e[:, 1]).sum())(given)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_backward_does_not_overwrite_the_output(precision):
    layers = hidden_layers(6, [5, 4], torch.Generator().manual_seed(0))
    with autocast(precision):
        output = layers(torch.randn(70, 6))
    before = output.detach().clone()
    output.float().sum().backward()
    assert torch.equal(output.detach(), before)
