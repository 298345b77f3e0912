"""The C++ kernels against float64, on any number of threads."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.optim import native
from stampede.optim.backends import choose_backend
from stampede.optim.backends.torch import TorchBackend
from stampede.optim.lookup import Lookup
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard
from support.lookups import dense, lookups, random_gradient, random_lookup
from support.threads import torch_threads

pytestmark = pytest.mark.usefixtures("cpp_kernels")
KERNELS = torch.ops.stampede


def summed(ids, offsets, first_rows, rows, grad, dim, pooled, mean=False, weights=None):
    lookup = Lookup(ids, offsets, first_rows, rows, pooled, mean, weights)
    return native.sum_by_row(lookup, grad, dim)


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
        with torch_threads(threads):
            KERNELS.catch_up_range_(w, m, v, last, 5, len(w), constants, 0, 7, 0.9, 0.999, 1e-3)
        assert (last[5:] == 7).all() and not last[:5].any()
        found.append((w, m, v))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


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
    with torch_threads(threads):
        choose_backend(array).pool_(lookup, whole[:, 1:-2])
    expected = torch.empty(lookup.batch, lookup.features * dim)
    TorchBackend(array).pool_(lookup, expected)
    torch.testing.assert_close(whole[:, 1:-2], expected, rtol=1e-5, atol=1e-5)
    assert (whole[:, [0, -2, -1]] == 7.0).all()


@settings(max_examples=80, deadline=None)
@given(lookup=LARGE, dim=WIDTHS, threads=SOME_THREADS, offsets_are_long=st.booleans())
def test_sums_by_row(lookup, dim, threads, offsets_are_long):
    lookup = replace(
        lookup, offsets=lookup.offsets.to([torch.int32, torch.int64][offsets_are_long])
    )
    grad = random_gradient(lookup, dim)
    # Columns of a wider matrix, as one array's are.
    wide = torch.cat([torch.ones(len(grad), 2), grad, torch.ones(len(grad), 1)], 1)
    with torch_threads(threads):
        rows, sums, counts = native.sum_by_row(lookup, wide[:, 2:-1], dim)
    expected, times = dense(lookup, grad, dim)
    assert torch.equal(rows, times.nonzero().flatten()) and torch.equal(counts, times[rows])
    torch.testing.assert_close(sums.double(), expected[rows], rtol=1e-5, atol=1e-5)


def test_the_number_of_threads_changes_no_bit():
    lookup = random_lookup(sizes=(50_000, 300), batch=4000, longest=2, device="cpu")
    grad, found = random_gradient(lookup, 12), []
    for number in (1, 2, 3, 7):
        with torch_threads(number):
            found.append(native.sum_by_row(lookup, grad, 12))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1])
def test_an_id_outside_its_table_is_pooled_as_the_first_one(wrong):
    table, output = torch.arange(20.0).view(5, 4), torch.empty(1, 8)
    ids, offsets = torch.tensor([1, wrong]), torch.tensor([0, 1, 2])
    KERNELS.pool_rows_(table, ids, offsets, torch.tensor([0, 3]), False, None, output)
    assert torch.equal(output, torch.cat([table[1], table[3]])[None])


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
    ids = torch.cat(
        [
            torch.randint(0, size, (int(own.sum()),), generator=draw)
            for size, own in zip(sizes, lengths.view(3, bags), strict=True)
        ]
    )
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
    with torch_threads(threads):
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


@pytest.mark.parametrize("wrong", [-1, 3])
def test_an_id_outside_its_table_is_refused_and_leaves_nothing_behind(wrong):
    first_rows, grad = torch.tensor([0, 3]), torch.ones(1, 8)
    offsets = torch.tensor([0, 1, 2])
    with pytest.raises(IndexError, match="outside its table"):
        summed(torch.tensor([wrong, 0]), offsets, first_rows, 6, grad, 4, pooled=True)
    rows, _, counts = summed(torch.tensor([1, 2]), offsets, first_rows, 6, grad, 4, pooled=True)
    assert rows.tolist() == [1, 5]
    assert counts.tolist() == [1, 1]

    assert counts.tolist() == [1, 1]


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
    torch.testing.assert_close(
        squares.double(), torch.stack([p.square().sum(1) for p in parts]), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(grads, kept)
