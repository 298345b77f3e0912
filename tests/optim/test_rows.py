"""Sums and counts of rows against a plain loop."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.optim.rows import merge_rows, sum_by_row


@settings(max_examples=50, deadline=None)
@given(
    ids=st.lists(st.integers(0, 6), max_size=30),
    sources=st.integers(1, 5),
    weighted=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_sums_and_counts(ids, sources, weighted, seed):
    draw = torch.Generator().manual_seed(seed)
    occurrences = torch.tensor(ids, dtype=torch.int64)
    source = torch.randn(sources, 3, generator=draw)
    picked = torch.randint(0, sources, (len(ids),), generator=draw)
    factors = torch.rand(len(ids), generator=draw) if weighted else None
    found = sum_by_row(occurrences, source, picked, factors)
    assert found.rows.tolist() == sorted(set(ids))
    for row, grad, count in zip(*found, strict=True):
        here = occurrences == row
        each = source[picked[here]] * (1 if factors is None else factors[here][:, None])
        assert count == here.sum()
        torch.testing.assert_close(grad, each.sum(0))


def test_the_order_of_a_sum_is_fixed():
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (20_000,), generator=draw)
    grads = torch.randn(20_000, 8, generator=draw)
    first = sum_by_row(ids, grads).grads
    assert all(torch.equal(first, sum_by_row(ids, grads).grads) for _ in range(3))


@settings(max_examples=50, deadline=None)
@given(
    parts=st.lists(st.lists(st.integers(0, 6), max_size=8), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_merged_parts_are_as_one_lookup(parts, seed):
    """Several lookups of a table, or several ranks: gradients and counts add up."""
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.tensor(part, dtype=torch.int64) for part in parts]
    grads = [torch.randn(len(part), 3, generator=draw, dtype=torch.float64) for part in parts]
    merged = merge_rows([sum_by_row(*part) for part in zip(ids, grads, strict=True)])
    whole = sum_by_row(torch.cat(ids), torch.cat(grads))
    assert torch.equal(merged.rows, whole.rows)
    assert torch.equal(merged.counts, whole.counts)
    torch.testing.assert_close(merged.grads, whole.grads)
