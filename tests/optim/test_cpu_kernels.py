"""The C++ kernels against float64, on any number of threads; one pass against several."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.engine.job.threads import using_threads
from stampede.optim import CowClip, native
from stampede.optim.backends import choose_backend
from stampede.optim.backends.cpu import CpuBackend
from stampede.optim.backends.torch import TorchBackend
from stampede.optim.lookup import Lookup
from stampede.optim.nonfinite import NonFiniteGradientError
from stampede.optim.rows import RowGradients
from stampede.optim.table_array import PendingUpdate, TableArray, TableShard
from stampede.optim.update import update_
from stampede.optim.update_settings import UpdateSettings
from support.lookups import dense, lookups, random_gradient, random_lookup

KERNELS = torch.ops.stampede


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    assert native.available()


def assert_same_bits(found):
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_the_number_of_threads_changes_no_bit_of_a_replay():
    found = []
    for threads in (1, 2, 4):
        draw = torch.Generator().manual_seed(0)
        # Several blocks of 4096 rows, one of them with rows at many steps.
        w, m = (torch.randn(20_011, 11, generator=draw) for _ in range(2))
        v = m.square()
        last = torch.zeros(len(w), dtype=torch.int32)
        last[9000:11_000] = torch.randint(0, 7, (2000,), generator=draw).int()
        constants = torch.tensor([[1e-3, 1e-8, 1.0]]).repeat(7, 1)
        with using_threads(threads):
            KERNELS.catch_up_range_(w, m, v, last, 5, len(w), constants, 0, 7, 0.9, 0.999, 1e-3)
        assert (last[5:] == 7).all() and not last[:5].any()
        found.append((w, m, v))
    assert_same_bits(found)


LARGE = lookups(device="cpu", rows=5000)
WIDTHS = st.integers(1, 70)
SOME_THREADS = st.integers(1, 4)


@settings(max_examples=80, deadline=None)
@given(lookup=LARGE, dim=WIDTHS, threads=SOME_THREADS)
def test_pools_rows(lookup, dim, threads):
    lookup = replace(lookup, pooled=True)
    table = torch.randn(lookup.rows, dim)
    array = TableArray.create([TableShard("t", lookup.rows)], table, UpdateSettings(), dim)
    # Columns of a wider output; the others are another array's.
    whole = torch.full((lookup.batch, lookup.features * dim + 3), 7.0)
    with using_threads(threads):
        choose_backend(array).pool_(lookup, whole[:, 1:-2])
    expected = torch.empty(lookup.batch, lookup.features * dim)
    TorchBackend(array).pool_(lookup, expected)
    torch.testing.assert_close(whole[:, 1:-2], expected, rtol=1e-5, atol=1e-5)
    assert (whole[:, [0, -2, -1]] == 7.0).all()


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(lookup=LARGE, dim=WIDTHS, threads=SOME_THREADS, offsets_are_long=st.booleans())
def test_sums_by_row(lookup, dim, threads, offsets_are_long):
    kind = torch.int64 if offsets_are_long else torch.int32
    lookup = replace(lookup, offsets=lookup.offsets.to(kind))
    grad = random_gradient(lookup, dim)
    # Columns of a wider matrix, as one array's are.
    wide = torch.cat([torch.ones(len(grad), 2), grad, torch.ones(len(grad), 1)], 1)
    with using_threads(threads):
        rows, sums, counts = native.sum_by_row(lookup, wide[:, 2:-1], dim)
    expected, times = dense(lookup, grad, dim)
    assert torch.equal(rows, times.nonzero().flatten()) and torch.equal(counts, times[rows])
    torch.testing.assert_close(sums.double(), expected[rows], rtol=1e-5, atol=1e-5)


def test_the_number_of_threads_changes_no_bit():
    lookup = random_lookup(sizes=(50_000, 300), batch=4000, longest=2, device="cpu")
    grad, found = random_gradient(lookup, 12), []
    for number in (1, 2, 3, 7):
        with using_threads(number):
            found.append(native.sum_by_row(lookup, grad, 12))
    assert_same_bits(found)


@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1])
def test_an_id_outside_its_table_is_pooled_as_the_first_one_and_has_no_gradient(wrong):
    table, output = torch.arange(20.0).view(5, 4), torch.empty(1, 8)
    first_rows, offsets = torch.tensor([0, 3]), torch.tensor([0, 1, 2])
    KERNELS.pool_rows_(table, torch.tensor([1, wrong]), offsets, first_rows, False, None, output)
    assert torch.equal(output, torch.cat([table[1], table[3]])[None])

    def summed(*ids):
        lookup = Lookup(torch.tensor(ids), offsets, first_rows, 6, True, False, None)
        return native.sum_by_row(lookup, torch.ones(1, 8), 4)

    with pytest.raises(IndexError, match="outside its table"):
        summed(wrong, 0)
    # It leaves nothing behind.
    rows, _, counts = summed(1, 2)
    assert rows.tolist() == [1, 5] and counts.tolist() == [1, 1]


@settings(max_examples=60, deadline=None)
@given(
    bags=st.sampled_from([1, 5, 9000]),
    longest=st.integers(0, 3),
    start=st.sampled_from([0, 7]),
    id_type=st.sampled_from([torch.int32, torch.int64]),
    damage=st.sampled_from(["", "id", "large id", "offsets", "first", "last"]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_whether_a_lookup_is_sound(bags, longest, start, id_type, damage, threads, seed):
    draw = torch.Generator().manual_seed(seed)
    first_rows, sizes = torch.tensor([0, 3, 3]), [3, 5, 5]
    lengths = torch.randint(0, longest + 1, (3 * bags,), generator=draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    totals = lengths.view(3, bags).sum(1).tolist()
    ids = [torch.randint(0, n, (m,), generator=draw) for n, m in zip(sizes, totals, strict=True)]
    ids = torch.cat(ids)
    sound = not damage and not start
    where = int(torch.randint(0, max(len(ids), 1), (), generator=draw))
    if damage in ("id", "large id"):
        if len(ids):
            ids[where] = {"id": -1, "large id": 5}[damage]
        sound = not len(ids) and not start
    elif damage == "offsets":
        if len(offsets) > 2 and offsets[-1] > 0:
            offsets[len(offsets) // 2] = offsets[-1] + 1
        else:
            sound = not start
    elif damage:
        offsets[{"first": 0, "last": -1}[damage]] += {"first": -1, "last": 1}[damage]
    with using_threads(threads):
        assert KERNELS.is_sound(ids.to(id_type), offsets + start, first_rows, 8) == sound


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 40),
    dim=st.integers(1, 130),
    steps=st.integers(1, 40),
    decay=st.sampled_from([0.0, 1e-5, 1e-2, 1.0]),
    eps=st.sampled_from([1e-12, 1e-8, 1e-7, 1e-3]),
    keep=st.sampled_from([1.0, 0.99]),
    size=st.sampled_from([1e-18, 1e-9, 1e-4, 1.0, 1e6]),
    seed=st.integers(0, 2**31),
)
def test_replays_steps(rows, dim, steps, decay, eps, keep, size, seed):
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, dim, generator=draw)
    # Moments as gradients of this size leave them; of some elements there has been none.
    m = torch.randn(rows, dim, generator=draw) * size
    v = m.square() * (0.1 + torch.rand(rows, dim, generator=draw))
    never = torch.rand(rows, dim, generator=draw) < 0.2
    m[never], v[never] = 0.0, 0.0
    last = torch.randint(0, steps + 1, (rows,), generator=draw).int()
    rates = torch.rand(steps, generator=draw) * 1e-3
    constants = torch.stack([rates, torch.full_like(rates, eps), torch.full_like(rates, keep)], 1)
    # As the kernel is given them.
    one, two = (float(torch.tensor(beta, dtype=torch.float32)) for beta in (0.9, 0.999))
    expected = [tensor.double() for tensor in (w, m, v)]
    for step, (alpha, e, k) in enumerate(constants.double()):
        at = last <= step
        ew, em, ev = (tensor[at] for tensor in expected)
        g = 2 * decay * ew
        em = one * em + (1 - one) * g
        ev = two * ev + (1 - two) * g * g
        ew = k * ew - alpha * em / (ev.sqrt() + e)
        for tensor, values in zip(expected, (ew, em, ev), strict=True):
            tensor[at] = values
    KERNELS.catch_up_range_(w, m, v, last, 0, rows, constants, 0, steps, 0.9, 0.999, decay)
    assert (last == steps).all()
    for found, exact in zip((w, m, v), expected, strict=True):
        scale = exact.abs().max().item()
        # Numbers below the least normal one are 0.
        atol = 2e-6 * scale + torch.finfo(torch.float32).tiny
        torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=atol)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 40),
    dim=st.integers(1, 70),
    clipped=st.floats(0, 1),
    l2=st.sampled_from([0.0, 1e-5, 0.3]),
    seed=st.integers(0, 2**31),
)
def test_measures_rows(n, dim, clipped, l2, seed):
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(50, dim, generator=draw)
    rows = torch.randperm(50, generator=draw)[:n]
    grads = torch.randn(n, dim, generator=draw)
    kept, columns = grads.clone(), round(clipped * dim)
    decayed, squares = KERNELS.measure_rows(weights, rows, grads, columns, l2)
    expected = grads.double() + 2 * l2 * weights[rows].double()
    torch.testing.assert_close(decayed.double(), expected, rtol=1e-6, atol=1e-6)
    parts = expected[:, :columns], expected[:, columns:], weights[rows][:, :columns].double()
    sums = torch.stack([part.square().sum(1) for part in parts])
    torch.testing.assert_close(squares.double(), sums, rtol=1e-5, atol=1e-6)
    assert torch.equal(grads, kept)


CLIPS = [
    CowClip(bound=1e-2),
    CowClip(ratio=0.5, bound=1e-2),
    CowClip(variant="paper", ratio=0.5, bound=1e-2),
    CowClip(granularity="row", threshold=0.3),
    CowClip(granularity="none"),
]


def array_of(rows, dim, setting, draw, size=0.1):
    weights = torch.randn(rows, dim, generator=draw) * size
    return TableArray.create([TableShard("t", rows)], weights, setting, dim)


def batch_of(rows, dim, draw, count):
    ids = torch.randperm(rows, generator=draw)[:count].sort().values
    grads = torch.randn(len(ids), dim, generator=draw)
    return RowGradients(ids, grads, torch.randint(1, 5, (len(ids),), generator=draw))


def pending_update(array, batch):
    return PendingUpdate(choose_backend(array), batch, 1e-2, 1)


@contextmanager
def ways():
    """Notes which of the two ways each update takes: measured before the step or in its pass."""
    taken, step_ = [], CpuBackend.step_

    def noted(backend, measured):
        taken.append("in its pass" if measured.values is None else "measured before")
        return step_(backend, measured)

    with mock.patch.object(CpuBackend, "step_", noted):
        yield taken


@pytest.mark.parametrize("on_nonfinite", ["error", "skip_row"])
@pytest.mark.parametrize("broken", ["gradient", "weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25])
def test_what_is_not_finite_is_left_to_the_passes(on_nonfinite, broken, value):
    """Of three arrays the one in the middle has a bad row; refused, nothing changes in any."""
    draw = torch.Generator().manual_seed(0)
    setting = UpdateSettings(rows="touched", l2=1e-3, on_nonfinite=on_nonfinite)
    arrays = [array_of(50, 12, setting, draw) for _ in range(3)]
    batches = [batch_of(50, 12, draw, 20) for _ in range(3)]
    bad = batches[1].rows[7]
    if broken == "gradient":
        batches[1].grads[7, 3] = value
    else:
        arrays[1].weights[bad, 3] = value
    before = [tensor.clone() for array in arrays for tensor in array.all_tensors()]
    pending = list(map(pending_update, arrays, batches))
    if on_nonfinite == "error":
        with pytest.raises(NonFiniteGradientError, match="no table of its collection was changed"):
            update_(pending)
        after = [tensor for array in arrays for tensor in array.all_tensors()]
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        return
    with ways() as taken:
        touched, _, skipped = torch.stack(update_(pending)).T.tolist()
    assert taken == ["in its pass", "measured before", "in its pass"]
    assert (touched, skipped) == ([20, 19, 20], [0, 1, 0])
    for array, batch in zip(arrays, batches, strict=True):
        moved = array.states["exp_avg"].any(1).nonzero().flatten()
        assert moved.tolist() == [row for row in batch.rows if array is not arrays[1] or row != bad]


def test_weights_whose_squares_overflow_are_above_any_gradient():
    setting = UpdateSettings(clip=CowClip(), rows="touched")
    draw = torch.Generator().manual_seed(0)
    array, batch = array_of(9, 4, setting, draw, size=1e25), batch_of(9, 4, draw, 5)
    with ways() as taken:
        (row_counts,) = update_([pending_update(array, batch)])
    assert taken == ["in its pass"]
    assert row_counts.tolist() == [5, 0, 0]
    assert array.states["exp_avg"][batch.rows].abs().min() > 0
    # A constant threshold does not depend on them.
    array.settings = UpdateSettings(clip=CowClip("row", threshold=1e-9), rows="touched")
    (row_counts,) = update_([pending_update(array, batch)])
    assert row_counts.tolist() == [5, 5, 0]


@given(
    rows=st.integers(0, 40),
    dim=st.integers(1, 40),
    value=st.sampled_from([0.0, 1.0, 1e15, 1e20, float("inf"), float("nan"), -float("inf")]),
    in_weights=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_whether_gradients_are_finite(rows, dim, value, in_weights, seed):
    draw = torch.Generator().manual_seed(seed)
    weights, grads = torch.randn(50, dim, generator=draw), torch.randn(rows, dim, generator=draw)
    ids = torch.randperm(50, generator=draw)[:rows]
    if rows:
        bad = int(torch.randint(0, rows, (), generator=draw))
        if in_weights:
            weights[ids[bad], dim - 1] = value
        else:
            grads[bad, dim - 1] = value
    found = torch.ops.stampede.are_finite(weights, ids, grads, 0.5)
    assert found == (not rows or abs(value) <= 1e15)


WIDTHS_AND_CLIPPED = [(12, 10), (1, None), (11, None), (33, 16)]


@pytest.mark.parametrize(
    "clip, dim, columns, rows",
    [
        (clip, *of_row, ("all", "touched")[(number + place) % 2])
        for number, clip in enumerate(CLIPS)
        for place, of_row in enumerate(WIDTHS_AND_CLIPPED)
    ],
)
def test_both_ways_give_the_same(clip, dim, columns, rows):
    """As where columns are split, whose norms are sums over shards."""
    found = []
    for is_split in (False, True):
        draw = torch.Generator().manual_seed(0)
        setting = UpdateSettings(clip=replace(clip, columns=columns), l2=1e-3, rows=rows)
        # What the L2 term may clip is a matter of sweeps.
        setting = replace(setting, l2=0.0) if setting.needs_all_rows else setting
        array, batch = array_of(5000, dim, setting, draw), batch_of(5000, dim, draw, 3000)
        array.is_split = is_split
        with ways() as taken, using_threads(3):
            (row_counts,) = update_([pending_update(array, batch)])
        assert taken == ["measured before" if is_split else "in its pass"]
        found.append((*array.all_tensors(), row_counts))
    # Weights are up to 0.1: a bit of the last place of one of them is 7e-9.
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)
