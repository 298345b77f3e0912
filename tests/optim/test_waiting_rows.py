"""Rows that take their steps later end where a sweep of all rows in every step would take them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.engine.job.threads import using_threads
from stampede.optim import CowClip, waiting_rows
from stampede.optim.rules import SGD, Adam, RowWiseAdam
from stampede.optim.update_settings import UpdateSettings
from support.updated_tables import (
    CAN_WAIT,
    Tables,
    assert_same_bits,
    computed,
    of_rows,
    one_step,
    state_of,
    trained,
    two_tables,
)


@pytest.mark.parametrize("setting", CAN_WAIT)
def test_same_bits_as_a_sweep(setting):
    def look(_, tbe):
        assert tbe.backends[0].waiting.behind

    swept = trained("kernels", setting, steps=80)
    assert_same_bits(swept, trained("waiting", setting, steps=80, at_step=look))


@pytest.mark.slow
def test_what_decays_becomes_zero():
    """Denormal numbers would make later steps many times slower."""
    # The first moment halves in each step: rows that were never looked up again are through.
    setting = UpdateSettings(rule=Adam((0.5, 0.9), 1e-8, "keras"), rows="all")
    least = torch.finfo(torch.float32).tiny
    tiny = torch.full((1 << 16,), least / 4)
    with using_threads(2):
        # A run before in this process may have started threads that go on without such numbers.
        kept = tiny * 2 > 0
    swept, waited, in_torch = (
        trained(way, setting, steps=150, threads=2) for way in ("kernels", "waiting", "torch")
    )
    assert_same_bits(swept, waited)

    def denormal(state):
        return sum(int(((t != 0) & (t.abs() < least)).sum()) for t in state)

    assert denormal(in_torch) > 0
    assert denormal(waited) == 0
    for found, expected in zip(waited, in_torch, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    # It is a matter of the kernels alone, on all threads.
    with using_threads(2):
        assert kept.any() and (tiny * 2 > 0)[kept].all()


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    window=st.integers(1, 40),
    steps=st.integers(1, 90),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_same_bits_in_any_pieces(window, steps, threads, seed):
    swept = trained("kernels", CAN_WAIT[0], steps, first=seed)
    found = trained("waiting", CAN_WAIT[0], steps, first=seed, window=window, threads=threads)
    assert_same_bits(swept, found)


@pytest.mark.parametrize("way, window", [("waiting", 5), ("queued", 3)])
def test_no_row_waits_longer_than_the_window(way, window):
    if way == "queued":
        pytest.importorskip("triton", reason="Triton is not installed")
    gaps = []

    def look(step, tbe):
        gaps.append(int(step + 1 - tbe.backends[0].waiting.last.min()))

    trained(way, CAN_WAIT[0], 3 * window, window=window, at_step=look)
    assert max(gaps) == window - 1


def test_a_lookup_sees_rows_up_to_date():
    with computed("waiting"):
        tbe = two_tables().tbe
        for number in range(2):
            one_step(tbe, number)
        assert tbe.backends[0].waiting.behind
        stale = tbe.arrays[0].weights[7].clone()
        with torch.no_grad():
            seen = tbe(torch.tensor([7, 40]), torch.tensor([0, 1, 2]))
        tbe.flush()
        whole = tbe.arrays[0].weights
        assert torch.equal(seen, torch.cat([whole[7], whole[340]])[None])
        assert not torch.equal(stale, whole[7])


def test_rows_with_a_gradient_that_is_not_finite_take_the_step_as_absent_ones():
    found = []
    for way in ("kernels", "waiting"):
        with computed(way):
            tbe = two_tables(UpdateSettings(l2=1e-3, on_nonfinite="skip_row")).tbe
            one_step(tbe, 0)
            output = tbe(torch.tensor([7, 8]), torch.tensor([0, 1, 2]))
            grad = torch.ones_like(output)
            grad[0, 3] = float("nan")
            output.backward(grad)
            assert tbe.row_counts[2] == 1
            one_step(tbe, 1)
            found.append(state_of(tbe))
    assert_same_bits(*found)


def made(rows, setting):
    return Tables(of_rows(rows), [4], [0], setting=setting).tbe


@pytest.mark.parametrize(
    "rows, touched, waits",
    [
        (100_000, 10, True),
        (100_000, 9000, True),
        (100_000, 10_000, False),
        (waiting_rows.FEWEST_ROWS, 10, True),
        (waiting_rows.FEWEST_ROWS - 1, 10, False),
    ],
)
def test_small_tables_and_those_with_a_batch_of_many_rows_are_swept(rows, touched, waits):
    tbe = made(rows, UpdateSettings(l2=1e-3))
    output = tbe(torch.arange(touched), torch.arange(touched + 1))
    output.backward(torch.ones_like(output))
    assert tbe.backends[0].waiting.behind == waits


@pytest.mark.parametrize(
    "setting",
    [
        UpdateSettings(rows="touched"),
        UpdateSettings(rule=RowWiseAdam(), l2=1e-3),
        UpdateSettings(rule=SGD(0.9), l2=1e-3),
        # Its L2 term may be clipped.
        UpdateSettings(clip=CowClip(granularity="row", threshold=1.0), l2=1e-3),
        UpdateSettings(clip=CowClip(ratio=1e-3), l2=1e-3),
    ],
)
def test_steps_that_depend_on_more_than_their_row_do_not_wait(setting):
    assert made(100_000, setting).backends[0].waiting is None
