"""Terms of both orders and inputs of stored rows, in one pass, against plain torch in float64."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stampede.models import CTRModel, StoredColumns
from stampede.models.deepfm import DeepFM
from stampede.models.orders import joined_with_orders
from stampede.models.registry import _NETWORKS, register
from stampede.native import switched_off
from stampede.settings import SettingsError
from support.dense import PRECISIONS, assert_near, autocast, rounded

KERNEL = "_JoinedWithOrders"


@settings(max_examples=80, deadline=None)
@given(
    samples=st.sampled_from([0, 1, 63, 64, 65, 300]),
    fields=st.integers(1, 7),
    dim=st.integers(1, 40),
    numbers=st.sampled_from([0, 1, 13, 16, 17]),
    has_weights=st.booleans(),
    precision=st.sampled_from(list(PRECISIONS)),
    seed=st.integers(0, 2**31),
)
def test_against_float64(samples, fields, dim, numbers, has_weights, precision, seed):
    draw = torch.Generator().manual_seed(seed)
    shape = samples, fields, StoredColumns(dim).stored
    stored = torch.randn(shape, generator=draw).requires_grad_()
    given = torch.randn(samples, numbers, generator=draw)
    weights = torch.randn(1, numbers, generator=draw).requires_grad_() if has_weights else None
    to_joined = rounded(torch.randn(samples, fields * dim + numbers, generator=draw), precision)
    to_orders = torch.randn(samples, generator=draw)
    with autocast(precision):
        joined, orders = joined_with_orders(stored, dim, given, weights)
    assert joined.dtype == PRECISIONS[precision][0] and orders.dtype == torch.float32
    assert KERNEL in joined.grad_fn.name()
    loss = (joined * to_joined.to(joined.dtype)).float().sum() + (orders * to_orders).sum()
    loss.backward()

    exact = stored.detach().double().requires_grad_()
    e = exact[..., :dim]
    expected = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1) + exact[..., dim].sum(1)
    if has_weights:
        wide = weights.detach().double().requires_grad_()
        expected = expected + (given.double() * wide).sum(1)
    inputs = torch.cat([e.flatten(1), given.double()], 1)
    ((inputs * to_joined).sum() + (expected * to_orders).sum()).backward()
    assert torch.equal(joined.float(), rounded(inputs.detach().float(), precision))
    assert_near(orders.detach(), expected.detach(), "fp32")
    assert_near(stored.grad, exact.grad, "fp32")
    assert not stored.grad[..., dim + 1 :].any()
    if has_weights:
        assert_near(weights.grad, wide.grad, "fp32")


def test_pairs_by_brute_force():
    stored = torch.tensor([[[1.0, 2.0, 10.0, 0.0], [3.0, 4.0, 20.0, 0.0], [5.0, 6.0, 30.0, 0.0]]])
    numbers, weights = torch.tensor([[7.0, 8.0]]), torch.tensor([[0.5, 0.25]])
    for needs_grad in (True, False):
        stored.requires_grad_(needs_grad)
        joined, orders = joined_with_orders(stored, 2, numbers, weights)
        pairs = (3 + 8) + (5 + 12) + (15 + 24)
        assert orders.tolist() == [10 + 20 + 30 + 3.5 + 2.0 + pairs]
        assert joined.tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nan_and_infinity_are_passed_on(precision):
    stored = torch.zeros(4, 2, 4)
    stored[1, 0, 0], stored[2, 1, 2], stored[3, 0, 1] = float("nan"), float("nan"), float("inf")
    stored.requires_grad_()
    with autocast(precision):
        joined, orders = joined_with_orders(stored, 2, torch.zeros(4, 0), None)
    assert orders[0] == 0 and orders[1].isnan() and orders[2].isnan()
    assert not orders[3].isfinite()
    torch.testing.assert_close(joined.float(), stored[..., :2].flatten(1), equal_nan=True)
    orders.backward(torch.tensor([float("nan"), 1.0, 2.0, 3.0]))
    assert stored.grad[0, :, :3].isnan().all()
    assert stored.grad[1:, :, 2].tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_rows_and_numbers_may_lie_in_memory_as_they_like():
    stored = torch.randn(3, 70, 4).transpose(0, 1).requires_grad_()
    numbers, weights = torch.randn(5, 70).t(), torch.randn(5, 1).t().requires_grad_()
    found = joined_with_orders(stored, 2, numbers, weights)
    assert KERNEL in found[0].grad_fn.name()
    grads = torch.autograd.grad(sum((one**2).sum() for one in found), [stored, weights])
    with switched_off():
        expected = joined_with_orders(stored, 2, numbers, weights)
    torch.testing.assert_close(found, expected)
    loss = sum((one**2).sum() for one in expected)
    torch.testing.assert_close(grads, torch.autograd.grad(loss, [stored, weights]))


@pytest.mark.parametrize("trained", ["rows", "weights"])
def test_gradients_of_what_is_trained_only(trained):
    stored, weights = torch.randn(70, 3, 4), torch.randn(1, 5)
    {"rows": stored, "weights": weights}[trained].requires_grad_()
    _, orders = joined_with_orders(stored, 2, torch.ones(70, 5), weights)
    orders.sum().backward()
    if trained == "rows":
        assert weights.grad is None and torch.equal(stored.grad[..., 2], torch.ones(70, 3))
    else:
        # Of tables that are frozen: plain torch.
        assert stored.grad is None and torch.equal(weights.grad, torch.full((1, 5), 70.0))


@pytest.mark.parametrize("why", ["numbers need a gradient", "float64", "torch.func"])
def test_plain_torch_computes_elsewhere(why):
    dtype = torch.float64 if why == "float64" else torch.float32
    stored, numbers = torch.randn(7, 3, 4, dtype=dtype), torch.randn(7, 2, dtype=dtype)
    if why == "torch.func":
        grad = torch.func.grad(lambda rows: joined_with_orders(rows, 2, numbers, None)[1].sum())
        assert torch.equal(grad(stored)[..., 2], torch.ones(7, 3))
        return
    numbers.requires_grad_(why == "numbers need a gradient")
    joined, orders = joined_with_orders(stored.requires_grad_(), 2, numbers, None)
    assert KERNEL not in joined.grad_fn.name()
    (joined.sum() + orders.sum()).backward()
    assert stored.grad.dtype == dtype
    assert numbers.grad is None or torch.equal(numbers.grad, torch.ones(7, 2))


def deepfm(numbers=2):
    model = CTRModel("deepfm", {"a": 5, "b": 7}, numbers, 3, [8, 8], seed=0)
    with torch.no_grad():
        model.bias.fill_(0.5)
    return model


def steps_of(node):
    """Names of the functions that a gradient passes through."""
    names, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(node.name())
            waiting += [following for following, _ in node.next_functions]
    return names


def outcome(model, rows, numbers, *, in_one_pass=True):
    """Logits, and gradients of rows and parameters."""
    model.zero_grad()
    rows = rows.clone().requires_grad_()
    logits = model.logits(rows, numbers)
    assert any(KERNEL in name for name in steps_of(logits.grad_fn)) == in_one_pass
    logits.square().sum().backward()
    dense = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [logits.detach(), rows.grad, *dense]


@pytest.mark.parametrize("numbers", [2, 0])
def test_a_model_gives_what_its_parts_do(numbers):
    model, rows = deepfm(numbers), torch.randn(70, 8)
    given = torch.randn(70, numbers)
    found = outcome(model, rows, given)
    embeddings, first_order = model.front.split(rows)
    expected = model.network(embeddings, given) + first_order.sum(1) + 0.5
    if numbers:
        expected = expected + model.number_weights(given).squeeze(1)
    torch.testing.assert_close(found[0], expected.detach())
    with switched_off():
        torch.testing.assert_close(found, outcome(model, rows, given, in_one_pass=False))


@pytest.mark.parametrize(
    "hooked", ["network", "number_weights", "another network", "a layer with a bias"]
)
def test_modules_that_are_hooked_or_replaced_are_called(hooked):
    model, rows, numbers = deepfm(), torch.randn(70, 8), torch.randn(70, 2)
    plain = outcome(model, rows, numbers)
    seen = []
    if hooked == "another network":

        class Sum(nn.Module):
            def forward(self, embeddings, dense):
                seen.append(len(dense))
                return embeddings.sum((1, 2))

        model.network = Sum()
    elif hooked == "a layer with a bias":
        seen.append(70)
        layer, model.number_weights = model.number_weights, nn.Linear(2, 1)
        with torch.no_grad():
            model.number_weights.weight.copy_(layer.weight)
            model.number_weights.bias.fill_(3.0)
    else:
        getattr(model, hooked).register_forward_hook(lambda *_: seen.append(70))
    found = outcome(model, rows, numbers, in_one_pass=False)
    assert seen == [70]
    if hooked in ("network", "number_weights"):
        torch.testing.assert_close(found, plain)
    elif hooked == "a layer with a bias":
        torch.testing.assert_close(found[0], plain[0] + 3.0)
        assert model.number_weights.bias.grad is not None


def test_a_subclass_is_called_where_it_differs():
    class Doubled(DeepFM):
        def forward(self, embeddings, dense):
            return 2 * super().forward(embeddings, dense)

    class Same(DeepFM):
        pass

    model, rows, numbers = deepfm(), torch.randn(70, 8), torch.randn(70, 2)
    plain = outcome(model, rows, numbers)
    for kind, factor in ((Same, 1), (Doubled, 2)):
        model.network.__class__ = kind
        embeddings, first_order = model.front.split(rows)
        expected = factor * DeepFM.forward(model.network, embeddings, numbers)
        expected = expected + first_order.sum(1) + model.number_weights(numbers).squeeze(1) + 0.5
        found = outcome(model, rows, numbers, in_one_pass=kind is Same)
        torch.testing.assert_close(found[0], expected.detach())
    assert (found[0] - plain[0]).abs().max() > 0.1


def test_gradients_of_a_batch_of_logits():
    model, numbers = deepfm(), torch.randn(7, 2)
    rows = torch.randn(7, 8).requires_grad_()
    for hooked in (False, True):
        if hooked:
            model.network.register_forward_hook(lambda *_: None)
        each = [torch.autograd.grad(model.logits(rows, numbers)[i], rows)[0] for i in range(7)]
        together = torch.autograd.grad(
            model.logits(rows, numbers), rows, torch.eye(7), is_grads_batched=True
        )
        torch.testing.assert_close(together[0], torch.stack(each))


@pytest.fixture
def model_of(monkeypatch):
    """A model of a network that is registered for it."""
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))

    def make(kind, numbers=2, first_order=True):
        register("own", first_order=first_order)(kind)
        return CTRModel("own", {"a": 5, "b": 7}, numbers, 3, [8], 0)

    return make


def test_what_cannot_do_without_numbers_is_refused(model_of):
    class Own(DeepFM):
        def with_first_order(self, stored, dim, numbers, number_weights):
            return super().with_first_order(stored, dim, numbers, number_weights) + (
                number_weights.sum()
            )

    model_of(Own)
    with pytest.raises(SettingsError, match=r"the network 'own' fails for stored \["):
        model_of(Own, numbers=0)


def test_logits_that_would_broadcast_are_refused(model_of):
    class Own(DeepFM):
        def with_first_order(self, *given):
            return super().with_first_order(*given).unsqueeze(1)

    with pytest.raises(
        SettingsError, match=r"returns \[2, 1\] .* its with_first_order must return"
    ):
        model_of(Own)


def test_stored_rows_that_are_changed_are_refused(model_of):
    class Own(DeepFM):
        def with_first_order(self, stored, *given):
            return super().with_first_order(stored.mul_(2), *given)

    with pytest.raises(SettingsError, match=r"`x = stored \* 2` instead of `stored.mul_\(2\)`"):
        model_of(Own)


def test_terms_that_were_not_asked_for_are_not_added(model_of):
    class Own(DeepFM):
        def with_first_order(self, *given):
            raise AssertionError("called")

    rows, numbers = torch.randn(5, 8), torch.randn(5, 2)
    model = model_of(Own, first_order=False)
    embeddings, _ = model.front.split(rows)
    expected = model.network(embeddings, numbers) + model.bias
    torch.testing.assert_close(model.logits(rows, numbers), expected)


def test_a_traced_model_gives_the_same():
    model, rows, numbers = deepfm(), torch.randn(70, 8), torch.randn(70, 2)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self, rows, dense):
            return self.model.logits(rows, dense)

    traced = torch.fx.symbolic_trace(Logits())
    grads = []
    for function in (traced, model.logits):
        given = rows.clone().requires_grad_()
        logits = function(given, numbers)
        assert any(KERNEL in name for name in steps_of(logits.grad_fn))
        logits.square().sum().backward()
        grads.append(given.grad)
    torch.testing.assert_close(*grads)
