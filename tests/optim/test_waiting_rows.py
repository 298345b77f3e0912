"""Rows that take their steps later end where a sweep of all rows in every step would take them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.optim import CowClip, waiting_rows
from stampede.optim.rules import SGD, Adam, RowWiseAdam
from stampede.optim.settings import UpdateSettings
from support.threads import torch_threads
from support.updated_tables import Tables, computed, of_rows

SIZES, DIM = (300, 41), 12


def trained(way, setting, steps, seed=0, window=3, at_step=None, threads=1):
    """Weights and moments after steps with another learning rate each."""
    draw = torch.Generator().manual_seed(seed)
    with torch_threads(threads), computed(way, window):
        tables = Tables(of_rows(*SIZES), [DIM] * 2, [0, 1], setting=setting, dim=DIM)
        tables.fill(draw)
        for step in range(steps):
            tables.tbe.set_learning_rate(float(torch.rand(1, generator=draw)) * 1e-2)
            one_step(tables.tbe, draw)
            if at_step is not None:
                at_step(step, tables.tbe)
        return state_of(tables.tbe)


def one_step(tbe, draw, bags=4):
    lengths = torch.randint(0, 3, (2 * bags,), generator=draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    # Some ids are frequent, most are rare.
    ids = [
        (torch.rand(int(lengths[f * bags : (f + 1) * bags].sum()), generator=draw) ** 3 * n).long()
        for f, n in enumerate(SIZES)
    ]
    output = tbe(torch.cat(ids), offsets)
    output.backward(torch.randn(output.shape, generator=draw))


def state_of(tbe):
    weights = [w.clone() for w in tbe.split_embedding_weights()]
    return weights + [s.clone() for _, states in tbe.shard_states() for s in states.values()]


def assert_same_bits(one, other):
    assert len(one) == len(other) > 2
    assert all(map(torch.equal, one, other))


SETTINGS = [
    UpdateSettings(l2=1e-3, clip=CowClip(bound=1e-3)),
    UpdateSettings(clip=CowClip(granularity="none"), l2=1e-2),
    UpdateSettings(clip=CowClip(columns=10), l2=1e-3, weight_decay=0.1),
    UpdateSettings(rule=Adam((0.5, 0.9), 1e-3, "torch"), weight_decay=0.3),
    UpdateSettings(clip=CowClip(granularity="row", threshold=0.1)),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_same_bits_as_a_sweep(setting):
    waited = []

    def look(_, tbe):
        waited.append(tbe.backends[0].waiting.behind)

    swept = trained("kernels", setting, steps=80)
    assert_same_bits(swept, trained("waiting", setting, steps=80, at_step=look))
    assert all(waited)


@pytest.mark.slow
def test_what_decays_becomes_zero(threads=2):
    """Denormal numbers would make later steps many times slower."""
    # The first moment halves in each step: rows that were never looked up again are through.
    setting = UpdateSettings(rule=Adam((0.5, 0.9), 1e-8, "keras"), rows="all")
    swept, waited, in_torch = (
        trained(way, setting, steps=240, threads=threads) for way in ("kernels", "waiting", "torch")
    )
    assert_same_bits(swept, waited)
    least = torch.finfo(torch.float32).tiny

    def denormal(state):
        return sum(int(((t != 0) & (t.abs() < least)).sum()) for t in state)

    assert denormal(in_torch) > 0
    assert denormal(waited) == 0
    for found, expected in zip(waited, in_torch, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    # It is a matter of the kernels alone, on all threads.
    tiny = torch.full((1 << 16,), least / 4)
    with torch_threads(threads):
        assert torch.equal(tiny * 2, torch.full((1 << 16,), least / 2)) and (tiny * 2 > 0).all()


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    window=st.integers(1, 40),
    steps=st.integers(1, 90),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_same_bits_in_any_pieces(window, steps, threads, seed):
    swept = trained("kernels", SETTINGS[0], steps, seed)
    assert_same_bits(swept, trained("waiting", SETTINGS[0], steps, seed, window, None, threads))


def test_no_row_waits_longer_than_the_window():
    gaps = []

    def look(step, tbe):
        gaps.append(int(step + 1 - tbe.backends[0].waiting.last.min()))

    trained("waiting", SETTINGS[0], 60, window=5, at_step=look)
    assert max(gaps) == 5 - 1
    assert gaps[-1] <= 5


def test_a_lookup_sees_rows_up_to_date():
    with computed("waiting"):
        tables = Tables(of_rows(*SIZES), [DIM] * 2, [0, 1], setting=SETTINGS[0], dim=DIM)
        draw = torch.Generator().manual_seed(0)
        tables.fill(draw)
        for _ in range(2):
            one_step(tables.tbe, draw)
        assert tables.tbe.backends[0].waiting.behind
        stale = tables.tbe.arrays[0].weights[7].clone()
        with torch.no_grad():
            seen = tables.tbe(torch.tensor([7, 40]), torch.tensor([0, 1, 2]))
        tables.tbe.flush()
        whole = tables.tbe.arrays[0].weights
        assert torch.equal(seen, torch.cat([whole[7], whole[340]])[None])
        assert not torch.equal(stale, whole[7])


def test_rows_with_a_gradient_that_is_not_finite_take_the_step_as_absent_ones():
    setting = UpdateSettings(l2=1e-3, on_nonfinite="skip_row")
    found = []
    for way in ("kernels", "waiting"):
        with computed(way):
            tables = Tables(of_rows(*SIZES), [DIM] * 2, [0, 1], setting=setting, dim=DIM)
            draw = torch.Generator().manual_seed(0)
            tables.fill(draw)
            one_step(tables.tbe, draw)
            output = tables.tbe(torch.tensor([7, 8]), torch.tensor([0, 1, 2]))
            grad = torch.ones_like(output)
            grad[0, :DIM] = float("nan")
            output.backward(grad)
            assert tables.tbe.row_counts[2] == 1
            one_step(tables.tbe, draw)
            found.append(state_of(tables.tbe))
    assert_same_bits(*found)


def made(rows, setting):
    tables = Tables(of_rows(rows), [4], [0], setting=setting)
    return tables.tbe.backends[0]


def test_small_tables_are_swept():
    setting = UpdateSettings(l2=1e-3)
    assert not made(waiting_rows.FEWEST_ROWS - 1, setting).waiting.defers
    assert made(waiting_rows.FEWEST_ROWS, setting).waiting.defers


@pytest.mark.parametrize("touched, waits", [(10, True), (9000, True), (10_000, False)])
def test_a_batch_of_many_rows_is_followed_by_a_sweep(touched, waits):
    tables = Tables(of_rows(100_000), [4], [0], setting=UpdateSettings(l2=1e-3))
    output = tables.tbe(torch.arange(touched), torch.arange(touched + 1))
    output.backward(torch.ones_like(output))
    assert tables.tbe.backends[0].waiting.behind == waits


@pytest.mark.parametrize(
    "setting",
    [
        UpdateSettings(rows="touched"),
        UpdateSettings(rule=RowWiseAdam(), l2=1e-3),
        UpdateSettings(rule=SGD(0.9), l2=1e-3),
        UpdateSettings(clip=CowClip(granularity="field", threshold=1.0)),
        # Its L2 term may be clipped.
        UpdateSettings(clip=CowClip(granularity="row", threshold=1.0), l2=1e-3),
        UpdateSettings(clip=CowClip(ratio=1e-3), l2=1e-3),
    ],
)
def test_steps_that_depend_on_more_than_their_row_do_not_wait(setting):
    assert made(100_000, setting).waiting is None
