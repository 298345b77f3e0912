"""Gradients of the kernels: of a part, of many, again, and after a failure."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.models import StoredColumns, cpu
from stampede.models.fm_terms import joined_with_orders, second_order
from stampede.models.mlp import MLP, hidden_layers
from support.dense import PRECISIONS, autocast, mlp_and_inputs


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
