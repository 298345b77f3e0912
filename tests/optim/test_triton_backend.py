"""Both halves of a queued step; test_queue.py compares it with the CPU's."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from stampede.optim import CowClip, waiting_rows
from stampede.optim.backends import triton as fused
from stampede.optim.nonfinite import NonFiniteFlag
from stampede.optim.rules import SGD, RowWiseAdam
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard
from support.lookups import DEVICE, dense, random_gradient, random_lookup

pytestmark = pytest.mark.usefixtures("small_triton_blocks")


def fused_update_(backend, lookup, grad, lr, step, row_counts):
    """Both halves of a step of one array."""
    backend.step_queued_(backend.measure_queued(lookup, grad), lr, step, row_counts)


def make_array(rows, dim, setting, dtype=torch.float32):
    weights = torch.randn(rows, dim, generator=torch.Generator().manual_seed(5)) * 0.1
    # A row of zeros has no norm for a threshold.
    weights[0] = 0.0
    return TableArray.create([TableShard("t", rows)], weights.to(DEVICE, dtype), setting, dim)


def backend_of(array):
    return fused.TritonBackend(array, NonFiniteFlag(torch.device(DEVICE)))


def train(array, lookup, grad):
    row_counts = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    fused_update_(backend_of(array), lookup, grad, 1e-2, 1, row_counts)
    return row_counts.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    setting = UpdateSettings(clip=CowClip(columns=10), l2=1e-2, weight_decay=0.1)
    lookup = random_lookup(batch=9, hot=2)
    array = make_array(lookup.rows, 12, setting)
    grad = random_gradient(lookup, 12)
    backend, row_counts = backend_of(array), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    fused_update_(backend, lookup, grad, 1e-2, 1, row_counts)
    before = copy.deepcopy([*array.all_tensors(), backend.waiting.last, row_counts])
    grad[3, 11] = bad
    fused_update_(backend, lookup, grad, 1e-2, 2, row_counts)
    assert int(backend._flag) > 0
    after = [*array.all_tensors(), backend.waiting.last, row_counts]
    assert all(map(torch.equal, after, before))


def test_arrays_that_are_updated_together_stay_together():
    setting = UpdateSettings()
    lookup = random_lookup()
    arrays = [make_array(lookup.rows, 12, setting) for _ in range(2)]
    before = copy.deepcopy([array.all_tensors() for array in arrays])
    flag, row_counts = NonFiniteFlag(torch.device(DEVICE)), torch.zeros(3, dtype=torch.int64)
    backends, measured = [fused.TritonBackend(array, flag) for array in arrays], []
    for position, backend in enumerate(backends):
        grad = random_gradient(lookup, 12)
        if position == 1:
            grad[:, 0] = float("nan")
        measured.append(backend.measure_queued(lookup, grad))
    for backend, of_array in zip(backends, measured, strict=True):
        backend.step_queued_(of_array, 1e-2, 1, row_counts.to(DEVICE))
    for array, whole in zip(arrays, before, strict=True):
        assert all(map(torch.equal, array.all_tensors(), whole))


def test_rows_note_their_step(monkeypatch):
    lookup = random_lookup(batch=3, longest=1)
    monkeypatch.setattr(waiting_rows, "FEWEST_ROWS", 0)
    backend = backend_of(make_array(lookup.rows, 12, UpdateSettings()))
    grad = random_gradient(lookup, 12)
    row_counts = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    fused_update_(backend, lookup, grad, 1e-2, 7, row_counts)
    counts = dense(lookup, grad, 12)[1]
    assert 0 < (counts > 0).sum() < lookup.rows
    # It is the turn of row 7, too.
    stepped = (counts > 0) | (torch.arange(lookup.rows) == 7)
    assert torch.equal(backend.waiting.last.cpu(), torch.where(stepped, 7, 6).int())


def test_a_slice_of_a_wider_output():
    setting = UpdateSettings(rows="touched")
    lookup = random_lookup()
    arrays = [make_array(lookup.rows, 4, setting) for _ in range(2)]
    grad = random_gradient(lookup, 4)
    wide = torch.cat([torch.ones_like(grad), grad, torch.ones_like(grad)], dim=1)
    train(arrays[0], lookup, grad)
    train(arrays[1], lookup, wide[:, grad.shape[1] : 2 * grad.shape[1]])
    assert all(map(torch.equal, arrays[0].all_tensors(), arrays[1].all_tensors()))


def test_a_copy_counts_no_rows():
    lookup = random_lookup()
    array = make_array(lookup.rows, 4, UpdateSettings())
    array.shards = (TableShard("t", lookup.rows, counted=False),)
    assert train(array, lookup, random_gradient(lookup, 4)) == [0, 0, 0]


def test_a_batch_without_ids():
    lookup = random_lookup(longest=0)
    array = make_array(lookup.rows, 4, UpdateSettings())
    before = copy.deepcopy(array.all_tensors())
    assert train(array, lookup, random_gradient(lookup, 4)) == [0, 0, 0]
    assert all(map(torch.equal, array.all_tensors(), before))


@pytest.mark.parametrize(
    "setting, dim, dtype, words",
    [
        (UpdateSettings(RowWiseAdam()), 4, torch.float32, "RowWiseAdam, not Adam"),
        (UpdateSettings(SGD()), 4, torch.float32, "SGD, not Adam"),
        (UpdateSettings(clip=CowClip("field", threshold=1.0)), 4, torch.float32, "whole tables"),
        (UpdateSettings(on_nonfinite="skip_row"), 4, torch.float32, "'skip_row'"),
        (UpdateSettings(), 4, torch.bfloat16, "bfloat16, not float32"),
        (UpdateSettings(), 6, torch.float32, "6 columns"),
        (UpdateSettings(), 260, torch.float32, "260 columns"),
    ],
)
def test_why_the_kernels_cannot_update_an_array(setting, dim, dtype, words):
    assert words in fused.why_not(make_array(12, dim, setting, dtype))
