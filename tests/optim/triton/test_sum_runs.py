"""Summed gradients of rows and their squared norms."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from stampede.optim.lookup import sorted_runs
from stampede.optim.triton.sum_runs import sum_runs
from support.lookups import DEVICE, dense, lookups, random_gradient, random_lookup, small_blocks


def assert_sums(lookup, dim, clipped, l2, sizes, grad=None):
    grad = random_gradient(lookup, dim) if grad is None else grad
    weights = torch.randn(lookup.rows, dim, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    nonfinite = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    runs = sorted_runs(lookup)
    found = sum_runs(
        runs,
        grad.reshape(-1, dim),
        weights,
        clipped=clipped,
        l2=l2,
        nonfinite=nonfinite,
        sizes=sizes,
    )
    expected, counts = dense(lookup, grad, dim)
    rows = counts.nonzero().flatten()
    number = len(rows)
    w = weights.cpu().double()[rows]
    expected = expected[rows] + 2 * l2 * w
    bound = {"rtol": 1e-5, "atol": 1e-5 * float(counts.max()) if number else 0.0}
    torch.testing.assert_close(found.grads[:number].cpu().double(), expected, **bound)
    squares = torch.stack(
        [
            expected[:, :clipped].square().sum(1),
            expected[:, clipped:].square().sum(1),
            w[:, :clipped].square().sum(1),
        ]
    )
    torch.testing.assert_close(
        found.squares[:, :number].cpu().double(), squares, rtol=1e-4, atol=1e-4
    )
    assert int(nonfinite) == 0
    return found


@settings(max_examples=40, deadline=None)
@given(lookup=lookups(), dim=st.sampled_from([4, 12, 20, 64]), data=st.data())
def test_sums_of_any_lookup(lookup, dim, data):
    clipped = data.draw(st.sampled_from([dim, dim - 1, dim - 3]))
    assert_sums(lookup, dim, clipped, data.draw(st.sampled_from([0.0, 0.3])), small_blocks(dim))


@pytest.mark.parametrize("weighted, mean", [(False, False), (True, True)])
@pytest.mark.parametrize("batch", [1, 4, 5, 8, 63])
def test_an_id_of_every_sample_crosses_windows(batch, weighted, mean):
    """Windows of 4, two at a time; table 0 has rows before and behind the hot one."""
    lookup = random_lookup(batch=batch, longest=1, hot=3, weighted=weighted, mean=mean)
    assert_sums(lookup, 12, 10, 1e-2, small_blocks(12))


def test_sizes_of_a_real_run():
    lookup = random_lookup(batch=300, longest=2, hot=3, weighted=True)
    assert_sums(lookup, 12, 10, 1e-2, None)


def test_widest_rows():
    assert_sums(random_lookup(), 256, 256, 1e-2, None)


def test_a_gradient_in_half_precision():
    lookup = random_lookup()
    assert_sums(lookup, 12, 12, 0.0, None, random_gradient(lookup, 12).half())


def test_bits_do_not_vary():
    lookup = random_lookup(batch=40, hot=1)
    one, other = (assert_sums(lookup, 12, 12, 0.1, small_blocks(12)) for _ in range(2))
    number = int(sorted_runs(lookup).count)
    assert torch.equal(one.grads[:number], other.grads[:number])
    assert torch.equal(one.squares[:, :number], other.squares[:, :number])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("column", [0, 11])
@pytest.mark.parametrize("hot", [None, 3])
def test_rows_that_are_not_finite_are_counted(bad, column, hot):
    """1e30 is finite, its square is not."""
    lookup = random_lookup(batch=20, hot=hot)
    grad = random_gradient(lookup, 12)
    grad[2, column] = bad
    runs = sorted_runs(lookup)
    nonfinite = torch.ones(1, dtype=torch.int32, device=DEVICE)
    weights = torch.zeros(lookup.rows, 12, device=DEVICE)
    sum_runs(
        runs,
        grad.view(-1, 12),
        weights,
        clipped=10,
        l2=0.1,
        nonfinite=nonfinite,
        sizes=small_blocks(12),
    )
    expected, _ = dense(lookup, grad, 12)
    rows = (~expected.abs().lt(1e20)).any(1).sum()
    assert rows > 0 and int(nonfinite) == 1 + int(rows)
