"""Ids sorted by row, and sums and counts of rows against a plain loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.optim import lookup as runs_module
from stampede.optim.lookup import Lookup, runs_from_fbgemm, runs_from_sort
from stampede.optim.rows import merge_rows, sum_by_row
from support.lookups import dense, lookups, random_gradient, random_lookup

DIM = 4


def assert_describes(runs, lookup):
    """Adding up by hand what the runs say gives the gradient by row."""
    grad = random_gradient(lookup, DIM)
    expected, counts = dense(lookup, grad, DIM)
    number = int(runs.count)
    assert runs.capacity == min(lookup.occurrences, lookup.rows)
    rows, starts = runs.rows[:number].cpu(), runs.starts.cpu().long()
    assert rows.tolist() == counts.nonzero().flatten().tolist()
    assert starts[0] == 0 and (starts[number:] == lookup.occurrences).all()
    assert starts.diff()[:number].tolist() == counts[rows].tolist()
    assert torch.equal(runs.ordered.cpu().long(), rows.repeat_interleave(counts[rows]))
    # Occurrences of a row keep their order, so that sums have one.
    firsts = lookup.first_rows[:, None].expand(-1, lookup.batch).flatten()
    of_each = (lookup.indices + firsts.repeat_interleave(lookup.offsets.diff())).cpu()
    if not lookup.pooled:
        assert torch.equal(runs.source.cpu().long(), of_each.argsort(stable=True))
    picked = grad.reshape(-1, DIM).cpu().double()[runs.source.cpu().long()]
    if runs.coefficient is not None:
        picked = picked * runs.coefficient.cpu().double()[:, None]
    found = torch.zeros_like(expected).index_add_(0, runs.ordered.cpu().long(), picked)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(lookup=lookups())
def test_runs_of_any_lookup(lookup):
    assert_describes(runs_from_sort(lookup), lookup)


def transposed(cumulative, bits, indices, offsets, *, nobag, total_unique_indices, **others):
    """What FBGEMM's operator returns, from its source (1.6 and 1.8); it has no CPU kernel."""
    sample_bits = others.pop("info_B_num_bits")
    assert not others
    assert cumulative.dtype == torch.int64 and offsets.dtype == indices.dtype
    features, positions = len(cumulative) - 1, torch.arange(len(indices))
    batch = (len(offsets) - 1) // features
    bags = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
    feature, sample = bags // batch, bags % batch
    linear = (indices + cumulative[feature]).to(indices.dtype)
    assert int(linear.max()) < 1 << bits and (nobag or batch < 1 << sample_bits)
    packed = (feature << sample_bits) | sample
    # 32 bits without a sign, seen as a signed number.
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    ordered, order = linear.sort(stable=True)
    found, lengths = ordered.unique_consecutive(return_counts=True)
    beyond = total_unique_indices - len(found)
    rows = torch.cat([found, torch.full((beyond,), -99, dtype=found.dtype)])
    lengths = torch.cat([lengths, torch.zeros(beyond, dtype=torch.int64)]).int()
    starts = torch.cat([lengths[:1] * 0, lengths.cumsum(0, dtype=torch.int32)])
    infos = positions * features + feature if nobag else packed
    number = torch.tensor([len(found)], dtype=torch.int32)
    return linear, ordered, infos[order], rows, lengths, number, starts


def assert_equal_to_sort(lookup):
    found, expected = runs_from_fbgemm(lookup), runs_from_sort(lookup)
    assert_describes(found, lookup)
    number = int(expected.count)
    assert int(found.count) == number
    assert torch.equal(found.rows[:number], expected.rows[:number])
    for name in ("starts", "ordered", "source", "coefficient"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        assert one is None or torch.equal(one, other.to(one.dtype)), name


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(lookup=lookups(device="cpu"))
def test_what_fbgemm_packs_is_unpacked(lookup):
    pytest.importorskip("fbgemm_gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.fbgemm, "transpose_embedding_input", transposed)
        assert_equal_to_sort(lookup)


def test_rows_without_a_batch_are_sorted():
    runs = runs_from_sort(Lookup.of_rows(torch.tensor([7, 1, 7, 3]), 10))
    assert runs.count.tolist() == [3] and runs.rows[:3].tolist() == [1, 3, 7]
    assert runs.source.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("features", [1, 2, 3, 4, 31, 32])
def test_features_and_samples_are_told_apart(monkeypatch, features):
    """At the borders of the bits that they are packed into; the top bit is a sign."""
    pytest.importorskip("fbgemm_gpu")
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.ops.fbgemm, "transpose_embedding_input", transposed)
    assert_equal_to_sort(random_lookup(sizes=[5] * features, tables=range(features), batch=33))


@pytest.mark.parametrize("bits", [2, 3])
def test_a_batch_that_does_not_fit_beside_the_feature(monkeypatch, bits):
    pytest.importorskip("fbgemm_gpu")
    monkeypatch.setattr(runs_module, "_INFO_BITS", bits)
    monkeypatch.setattr(torch.ops.fbgemm, "transpose_embedding_input", transposed)
    assert_equal_to_sort(random_lookup(batch=33, device="cpu"))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="FBGEMM sorts on a GPU only")


@needs_gpu
@settings(max_examples=200, deadline=None)
@given(lookup=lookups())
def test_fbgemms_sort_is_torchs(lookup):
    pytest.importorskip("fbgemm_gpu")
    assert_equal_to_sort(lookup)


@needs_gpu
def test_nothing_waits_for_the_device():
    pytest.importorskip("fbgemm_gpu")
    lookup = random_lookup(batch=64, weighted=True, mean=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs_from_fbgemm(lookup)
        runs_from_sort(lookup)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
