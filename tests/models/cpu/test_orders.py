"""Terms of both orders and inputs of stored rows, in one pass, against plain torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.models import StoredColumns
from stampede.models.fm_terms import joined_with_orders
from stampede.native_library import switched_off
from support.dense import PRECISIONS, assert_near, autocast, rounded

KERNEL = "_JoinedWithOrders"


@settings(max_examples=80, deadline=None)
@given(
    samples=st.sampled_from([0, 1, 63, 64, 65, 300]),
    fields=st.integers(1, 7),
    dim=st.integers(1, 40),
    numbers=st.sampled_from([0, 1, 13, 16, 17]),
    has_weights=st.booleans(),
    scale=st.sampled_from([1.0, 0.3, 7.0]),
    precision=st.sampled_from(list(PRECISIONS)),
    seed=st.integers(0, 2**31),
)
def test_against_float64(samples, fields, dim, numbers, has_weights, scale, precision, seed):
    draw = torch.Generator().manual_seed(seed)
    shape = samples, fields, StoredColumns(dim).stored
    stored = torch.randn(shape, generator=draw).requires_grad_()
    given = torch.randn(samples, numbers, generator=draw)
    weights = torch.randn(1, numbers, generator=draw).requires_grad_() if has_weights else None
    to_joined = rounded(torch.randn(samples, fields * dim + numbers, generator=draw), precision)
    to_orders = torch.randn(samples, generator=draw)
    with autocast(precision):
        joined, orders = joined_with_orders(stored, dim, given, weights, scale)
    assert joined.dtype == PRECISIONS[precision][0] and orders.dtype == torch.float32
    assert KERNEL in joined.grad_fn.name()
    loss = (joined * to_joined.to(joined.dtype)).float().sum() + (orders * to_orders).sum()
    loss.backward()

    exact = stored.detach().double().requires_grad_()
    e = exact[..., :dim]
    first_order = exact[..., dim].sum(1)
    if has_weights:
        wide = weights.detach().double().requires_grad_()
        first_order = first_order + (given.double() * wide).sum(1)
    pairs = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1)
    expected = pairs + scale * first_order
    inputs = torch.cat([e.flatten(1), given.double()], 1)
    ((inputs * to_joined).sum() + (expected * to_orders).sum()).backward()
    assert torch.equal(joined.float(), rounded(inputs.detach().float(), precision))
    assert_near(orders.detach(), expected.detach(), "fp32")
    assert_near(stored.grad, exact.grad, "fp32")
    assert not stored.grad[..., dim + 1 :].any()
    if has_weights:
        assert_near(weights.grad, wide.grad, "fp32")


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

    def outcome():
        both = joined_with_orders(stored, 2, numbers, weights)
        loss = sum((one**2).sum() for one in both)
        return both, torch.autograd.grad(loss, [stored, weights], retain_graph=True)

    found = outcome()
    assert KERNEL in found[0][0].grad_fn.name()
    with switched_off():
        # Sums of squares of some 100 are rounded in another order.
        torch.testing.assert_close(found, outcome(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("trained", ["rows", "weights"])
def test_only_trained_tensors_get_gradients(trained):
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
