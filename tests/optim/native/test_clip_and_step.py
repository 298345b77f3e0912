"""L2, clip and step of rows in one pass, against float64 and against the passes one by one."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stampede.optim import CowClip, native, update
from stampede.optim.missed_steps import MissedSteps
from stampede.optim.native import kernels
from stampede.optim.nonfinite import NonFiniteGradientError
from stampede.optim.reduction import PendingUpdate
from stampede.optim.rows import RowGradients
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard
from stampede.optim.update import update_
from support.threads import torch_threads

CLIPS = [
    CowClip(bound=1e-2),
    CowClip(ratio=0.5, bound=1e-2),
    CowClip(variant="paper", ratio=0.5, bound=1e-2),
    CowClip(granularity="row", threshold=0.3),
    CowClip(granularity="none"),
]


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    assert native.available()


def array_of(rows, dim, setting, draw, size=0.1):
    weights = torch.randn(rows, dim, generator=draw) * size
    return TableArray.create([TableShard("t", rows)], weights, setting, dim)


def batch_of(rows, dim, draw, count):
    ids = torch.randperm(rows, generator=draw)[:count].sort().values
    grads = torch.randn(len(ids), dim, generator=draw)
    return RowGradients(ids, grads, torch.randint(1, 5, (len(ids),), generator=draw))


@settings(max_examples=120, deadline=None)
@given(
    rows=st.sampled_from([1, 3, 1500, 5000]),
    dim=st.sampled_from([1, 3, 4, 11, 12, 16, 33]),
    columns=st.sampled_from([None, 1, 10]),
    clip=st.sampled_from(CLIPS),
    l2=st.sampled_from([0.0, 1e-2]),
    moved=st.sampled_from(["all", "touched"]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_steps_against_float64(rows, dim, columns, clip, l2, moved, threads, seed):
    draw = torch.Generator().manual_seed(seed)
    clip = CowClip(clip.granularity, clip.ratio, clip.bound, clip.threshold, clip.variant, columns)
    setting = UpdateSettings(clip=clip, l2=l2, rows=moved)
    # The L2 term of rows that are not in the batch may be clipped: a matter of sweeps.
    assume(not setting.needs_all_rows)
    array = array_of(rows, dim, setting, draw)
    if moved == "all":
        array.missed = MissedSteps(array, defers=False)
    width = min(columns or dim, dim)
    w, m, v = (tensor.double().clone() for tensor in array.adam_tensors())
    lr, clipped = 1e-2, 0
    for step in range(1, 4):
        batch = batch_of(rows, dim, draw, max(rows // 2, 1))
        with (
            torch_threads(threads),
            mock.patch.object(update, "_begin", side_effect=AssertionError),
        ):
            (outcome,) = update_([PendingUpdate(array, batch, lr, step)])
        g = 2 * l2 * w
        g[batch.rows] += batch.grads.double()
        if clip.by_row:
            norms = w[:, :width].norm(dim=1)
            counts = torch.ones(rows, dtype=torch.float64)
            counts[batch.rows] = batch.counts.double()
            if clip.granularity == "row":
                most = torch.full_like(norms, clip.threshold)
            elif clip.variant == "paper":
                most = (clip.ratio * norms).clamp_min(clip.bound)
            else:
                least = clip.ratio * math.sqrt(width) * clip.bound
                most = clip.ratio * norms.clamp_min(least)
            most = most * counts
            found = g[:, :width].norm(dim=1)
            factor = torch.where(found > most, most / found, 1.0)
            # Missed steps are not clipped: what the L2 term alone gives is below the threshold.
            present = torch.zeros(rows, dtype=torch.bool)
            present[batch.rows] = True
            clipped = int((factor[present] < 1).sum())
            g[:, :width] *= torch.where(present, factor, 1.0)[:, None]
        moving = batch.rows if moved == "touched" else torch.arange(rows)
        m[moving] = 0.9 * m[moving] + 0.1 * g[moving]
        v[moving] = 0.999 * v[moving] + 0.001 * g[moving] ** 2
        alpha = lr * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        w[moving] -= alpha * m[moving] / (v[moving].sqrt() + 1e-7)
        assert int(outcome.touched) == len(batch.rows) and int(outcome.skipped) == 0
        assert abs(int(outcome.clipped) - clipped) <= 1
    for found, exact in zip(array.adam_tensors(), (w, m, v), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("on_nonfinite", ["error", "skip_row"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_gradients_that_are_not_finite_are_left_to_the_other_way(on_nonfinite, value):
    draw = torch.Generator().manual_seed(0)
    setting = UpdateSettings(rows="touched", on_nonfinite=on_nonfinite)
    array, batch = array_of(50, 12, setting, draw), batch_of(50, 12, draw, 20)
    batch.grads[7, 3] = value
    before = [tensor.clone() for tensor in array.all_tensors()]
    if on_nonfinite == "error":
        with pytest.raises(NonFiniteGradientError, match="no table of its collection was changed"):
            update_([PendingUpdate(array, batch, 1e-2, 1)])
        assert all(map(torch.equal, array.all_tensors(), before))
        return
    (outcome,) = update_([PendingUpdate(array, batch, 1e-2, 1)])
    assert (int(outcome.touched), int(outcome.skipped)) == (19, 1)
    changed = (array.weights != before[0]).any(1)
    assert changed.nonzero().flatten().tolist() == [r for r in batch.rows if r != batch.rows[7]]


@pytest.mark.parametrize("on_nonfinite", ["error", "skip_row"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_rows_whose_weights_are_not_finite_are_left_alone(on_nonfinite, value):
    draw = torch.Generator().manual_seed(0)
    setting = UpdateSettings(rows="touched", on_nonfinite=on_nonfinite)
    array, batch = array_of(50, 12, setting, draw), batch_of(50, 12, draw, 20)
    bad = int(batch.rows[7])
    array.weights[bad, 3] = value
    before = array.weights.clone()
    if on_nonfinite == "error":
        with pytest.raises(NonFiniteGradientError, match="the weights of 1 embedding rows"):
            update_([PendingUpdate(array, batch, 1e-2, 1)])
    else:
        (outcome,) = update_([PendingUpdate(array, batch, 1e-2, 1)])
        assert (int(outcome.touched), int(outcome.skipped)) == (19, 1)
    assert torch.equal(array.weights[bad].isfinite(), before[bad].isfinite())
    assert array.states["exp_avg"][bad].abs().max() == 0
    assert (array.weights != before)[batch.rows[:7]].all()


def test_large_weights_have_a_norm():
    setting = UpdateSettings(clip=CowClip(), rows="touched")
    draw = torch.Generator().manual_seed(0)
    array, batch = array_of(9, 4, setting, draw, size=1e25), batch_of(9, 4, draw, 5)
    (outcome,) = update_([PendingUpdate(array, batch, 1e-2, 1)])
    assert (int(outcome.clipped), int(outcome.skipped)) == (0, 0)
    assert array.states["exp_avg"][batch.rows].abs().min() > 0


@given(
    rows=st.integers(0, 40),
    dim=st.integers(1, 40),
    value=st.sampled_from([0.0, 1.0, 1e15, 1e20, float("inf"), float("nan"), -float("inf")]),
    seed=st.integers(0, 2**31),
)
def test_what_is_called_finite_is(rows, dim, value, seed):
    draw = torch.Generator().manual_seed(seed)
    grads = torch.randn(rows, dim, generator=draw)
    if rows:
        grads[int(torch.randint(0, rows, (), generator=draw)), dim - 1] = value
    assert kernels.are_finite(grads) == (not rows or abs(value) <= 1e15)


def test_both_ways_give_the_same():
    """As where columns are split, whose norms are sums over shards."""
    outcomes = []
    for is_split in (False, True):
        draw = torch.Generator().manual_seed(0)
        setting = UpdateSettings(clip=CowClip(columns=10), l2=1e-3, rows="touched")
        array, batch = array_of(500, 12, setting, draw), batch_of(500, 12, draw, 300)
        array.is_split = is_split
        (outcome,) = update_([PendingUpdate(array, batch, 1e-2, 1)])
        outcomes.append((*array.all_tensors(), outcome.touched, outcome.clipped, outcome.skipped))
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
