"""Missed steps, replayed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from stampede.optim.rules import Adam, step_constants
from stampede.optim.triton.steps import catch_up_range_, catch_up_rows_
from support.lookups import DEVICE, small_blocks

BETAS = (0.9, 0.99)
ROWS = 11
FINITE = torch.zeros(1, dtype=torch.int32, device=DEVICE)


def rate(step):
    """Learning rates change, as in a warm-up."""
    return 1e-2 * (1 + step % 3) / 3


def steps_after(first, count, placement="keras", decay=0.1):
    rule = Adam(BETAS, 1e-5, placement)
    constants = [
        step_constants(rule, rate(step), step, decay)
        for step in range(first + 1, first + count + 1)
    ]
    return torch.tensor(constants, dtype=torch.float32, device=DEVICE).reshape(-1, 3)


def random_state(dim, seed=0):
    draw = torch.Generator().manual_seed(seed)
    w, m, v = (torch.randn(ROWS, dim, generator=draw) * 0.1 for _ in range(3))
    return [t.to(DEVICE) for t in (w, m, v.square())]


def marks(value):
    return torch.full((ROWS,), value, dtype=torch.int32, device=DEVICE)


def dense_loop(state, since, now, l2, placement="keras", decay=0.1):
    """In float64, every row on its own; Adam as it is written in the papers."""
    w, m, v = (t.cpu().double() for t in state)
    for row, first in enumerate(since.tolist()):
        for step in range(first + 1, now + 1):
            g = 2 * l2 * w[row]
            w[row] *= 1 - rate(step) * decay
            m[row] = BETAS[0] * m[row] + (1 - BETAS[0]) * g
            v[row] = BETAS[1] * v[row] + (1 - BETAS[1]) * g * g
            one, two = 1 - BETAS[0] ** step, 1 - BETAS[1] ** step
            if placement == "keras":
                w[row] -= rate(step) * two**0.5 / one * m[row] / (v[row].sqrt() + 1e-5)
            else:
                w[row] -= rate(step) * (m[row] / one) / ((v[row] / two).sqrt() + 1e-5)
    return w, m, v


def assert_close(state, expected):
    for found, whole in zip(state, expected, strict=True):
        torch.testing.assert_close(
            found.cpu().double(), whole, rtol=1e-4, atol=1e-6 * float(whole.abs().max())
        )


@pytest.mark.parametrize("placement", ["keras", "torch"])
@pytest.mark.parametrize("dim", [4, 12, 20])
def test_replay_is_the_dense_loop_with_changing_learning_rates(dim, placement):
    state, last = random_state(dim), (torch.arange(ROWS) % 4 + 2).int().to(DEVICE)
    expected = dense_loop(state, last, 9, l2=0.05, placement=placement)
    steps = steps_after(2, 10, placement)
    catch_up_range_(*state, last, 0, ROWS, steps, 2, 9, BETAS, 0.05, FINITE, small_blocks(dim))
    assert_close(state, expected)
    assert (last == 9).all()


def test_only_the_rows_of_a_range_move():
    state, last = random_state(12), marks(0)
    before = [t.clone() for t in state]
    expected = dense_loop(state, last, 3, l2=0.05)
    catch_up_range_(*state, last, 2, 7, steps_after(0, 3), 0, 3, BETAS, 0.05, FINITE)
    inside = torch.zeros(ROWS, dtype=torch.bool)
    inside[2:7] = True
    assert_close([t[2:7] for t in state], [t[2:7] for t in expected])
    for found, was in zip(state, before, strict=True):
        assert torch.equal(found[~inside], was[~inside])
    assert torch.equal(last.cpu(), torch.where(inside, 3, 0).int())


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 11), max_size=4),
    dim=st.sampled_from([4, 12]),
    l2=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 99),
)
def test_pieces_give_the_same_bits(cuts, dim, l2, seed):
    """At once or in pieces, of a range or of listed rows, with rows at different steps."""
    draw = torch.Generator().manual_seed(seed)
    since = torch.randint(0, 5, (ROWS,), generator=draw).int().to(DEVICE)
    at_once, in_pieces = random_state(dim, seed), random_state(dim, seed)
    last = since.clone()
    catch_up_range_(*at_once, last, 0, ROWS, steps_after(0, 12), 0, 12, BETAS, l2, FINITE)
    last = since.clone()
    listed = torch.randperm(ROWS, generator=draw)[:6].sort().values.to(DEVICE)
    count = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    for now in [*sorted(cuts), 12]:
        sizes = small_blocks(dim)
        steps = steps_after(0, 12)
        catch_up_rows_(*in_pieces, last, listed, count, steps, 0, now, BETAS, l2, FINITE, sizes)
        assert (last[listed[:4]] == torch.clamp(since[listed[:4]], min=now)).all()
        assert torch.equal(last[listed[4:]], since[listed[4:]])
    # A window of steps that begins later.
    earliest = int(last.min())
    steps = steps_after(earliest, 12 - earliest)
    catch_up_range_(*in_pieces, last, 0, ROWS, steps, earliest, 12, BETAS, l2, FINITE)
    assert (last == 12).all()
    assert all(map(torch.equal, at_once, in_pieces))


@pytest.mark.parametrize("now", [0, 3])
def test_rows_that_miss_nothing_stay(now):
    state, last = random_state(12), marks(3)
    before = [t.clone() for t in state]
    rows = torch.arange(ROWS, device=DEVICE)
    count = torch.tensor([ROWS], dtype=torch.int32, device=DEVICE)
    catch_up_range_(*state, last, 0, ROWS, steps_after(0, 5), 0, now, BETAS, 0.05, FINITE)
    catch_up_rows_(*state, last, rows, count, steps_after(0, 5), 0, now, BETAS, 0.05, FINITE)
    assert all(map(torch.equal, state, before)) and (last == 3).all()


def test_no_rows_at_all():
    state, last = random_state(12), marks(0)
    rows = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    catch_up_rows_(*state, last, rows, count, steps_after(0, 5), 0, 5, BETAS, 0.05, FINITE)
    catch_up_range_(*state, last, 4, 4, steps_after(0, 5), 0, 5, BETAS, 0.05, FINITE)
    assert (last == 0).all()
