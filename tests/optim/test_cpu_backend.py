"""L2, clip and step of rows in one pass, against the passes one by one."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stampede.optim import CowClip
from stampede.optim.backends import choose_backend
from stampede.optim.backends.cpu import CpuBackend
from stampede.optim.backends.torch import PendingUpdate
from stampede.optim.nonfinite import NonFiniteGradientError
from stampede.optim.rows import RowGradients
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard
from stampede.optim.update import update_
from support.threads import torch_threads

pytestmark = pytest.mark.usefixtures("cpp_kernels")
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


@contextmanager
def ways():
    """Notes which of the two ways an update takes."""
    taken = []

    def noted(owner, name):
        function = getattr(owner, name)
        return mock.patch.object(
            owner, name, lambda *given: (taken.append(name), function(*given))[1]
        )

    with noted(CpuBackend, "measure"), noted(CpuBackend, "step_at_once_"):
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
    pending = [
        PendingUpdate(choose_backend(array), batch, 1e-2, 1)
        for array, batch in zip(arrays, batches, strict=True)
    ]
    if on_nonfinite == "error":
        with pytest.raises(NonFiniteGradientError, match="no table of its collection was changed"):
            update_(pending)
        after = [tensor for array in arrays for tensor in array.all_tensors()]
        for one, other in zip(after, before, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        return
    with ways() as taken:
        touched, _, skipped = torch.stack(update_(pending)).T.tolist()
    assert taken == ["measure", "step_at_once_", "step_at_once_"]
    assert (touched, skipped) == ([20, 19, 20], [0, 1, 0])
    for array, batch in zip(arrays, batches, strict=True):
        moved = array.states["exp_avg"].any(1).nonzero().flatten()
        assert moved.tolist() == [row for row in batch.rows if array is not arrays[1] or row != bad]


def test_weights_whose_squares_overflow_are_above_any_gradient():
    setting = UpdateSettings(clip=CowClip(), rows="touched")
    draw = torch.Generator().manual_seed(0)
    array, batch = array_of(9, 4, setting, draw, size=1e25), batch_of(9, 4, draw, 5)
    with ways() as taken:
        (row_counts,) = update_([PendingUpdate(choose_backend(array), batch, 1e-2, 1)])
    assert taken == ["step_at_once_"]
    assert row_counts.tolist() == [5, 0, 0]
    assert array.states["exp_avg"][batch.rows].abs().min() > 0
    # A constant threshold does not depend on them.
    array.settings = UpdateSettings(clip=CowClip("row", threshold=1e-9), rows="touched")
    (row_counts,) = update_([PendingUpdate(choose_backend(array), batch, 1e-2, 2)])
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


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("rows", ["all", "touched"])
@pytest.mark.parametrize("dim, columns", [(12, 10), (1, None), (11, None), (33, 16)])
def test_both_ways_give_the_same(clip, rows, dim, columns):
    """As where columns are split, whose norms are sums over shards."""
    found = []
    for is_split in (False, True):
        draw = torch.Generator().manual_seed(0)
        setting = UpdateSettings(clip=replace(clip, columns=columns), l2=1e-3, rows=rows)
        # What the L2 term may clip is a matter of sweeps.
        setting = replace(setting, l2=0.0) if setting.needs_all_rows else setting
        array, batch = array_of(5000, dim, setting, draw), batch_of(5000, dim, draw, 3000)
        array.is_split = is_split
        with ways() as taken, torch_threads(3):
            (row_counts,) = update_([PendingUpdate(choose_backend(array), batch, 1e-2, 1)])
        assert taken == ["measure" if is_split else "step_at_once_"]
        found.append((*array.all_tensors(), row_counts))
    for one, other in zip(*found, strict=True):
        # Weights are up to 0.1: a bit of the last place of one of them is 7e-9.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
