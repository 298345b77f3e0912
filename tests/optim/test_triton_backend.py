"""What queued steps refuse; test_queue.py compares them with the CPU's."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from stampede.optim import CowClip
from stampede.optim.backends import triton as fused
from stampede.optim.nonfinite import NonFiniteFlag
from stampede.optim.rules import SGD, RowWiseAdam
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard
from support.lookups import DEVICE, random_gradient, random_lookup

pytestmark = pytest.mark.usefixtures("small_triton_blocks")


def make_array(rows, dim, setting, dtype=torch.float32):
    weights = torch.randn(rows, dim, generator=torch.Generator().manual_seed(5)) * 0.1
    # A row of zeros has no norm for a threshold.
    weights[0] = 0.0
    return TableArray.create([TableShard("t", rows)], weights.to(DEVICE, dtype), setting, dim)


@pytest.mark.parametrize("bad", [float("nan"), 1e30])
def test_arrays_that_are_updated_together_stay_together(bad):
    setting = UpdateSettings()
    lookup = random_lookup()
    arrays = [make_array(lookup.rows, 12, setting) for _ in range(2)]
    before = copy.deepcopy([array.all_tensors() for array in arrays])
    flag, row_counts = NonFiniteFlag(torch.device(DEVICE)), torch.zeros(3, dtype=torch.int64)
    backends, measured = [fused.TritonBackend(array, flag) for array in arrays], []
    for position, backend in enumerate(backends):
        grad = random_gradient(lookup, 12)
        if position == 1:
            grad[:, 0] = bad
        measured.append(backend.measure_queued(lookup, grad))
    for backend, of_array in zip(backends, measured, strict=True):
        backend.step_queued_(of_array, 1e-2, 1, row_counts.to(DEVICE))
    for array, whole in zip(arrays, before, strict=True):
        assert all(map(torch.equal, array.all_tensors(), whole))


@pytest.mark.parametrize("counted", [True, False])
def test_a_copy_counts_no_rows(counted):
    lookup = random_lookup()
    array = make_array(lookup.rows, 4, UpdateSettings())
    array.shards = (TableShard("t", lookup.rows, counted=counted),)
    backend = fused.TritonBackend(array, NonFiniteFlag(torch.device(DEVICE)))
    row_counts = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    measured = backend.measure_queued(lookup, random_gradient(lookup, 4))
    backend.step_queued_(measured, 1e-2, 1, row_counts)
    assert bool(row_counts.any()) == counted


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
