"""The whole update of a batch's rows, against the equations and against `update_`."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from stampede.optim import CowClip, waiting_rows
from stampede.optim.backends import choose_backend
from stampede.optim.backends import triton as fused
from stampede.optim.backends.torch import PendingUpdate
from stampede.optim.nonfinite import NonFiniteFlag
from stampede.optim.rows import RowGradients
from stampede.optim.rules import SGD, Adam, RowWiseAdam
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard
from stampede.optim.update import update_
from support.lookups import DEVICE, dense, lookups, random_gradient, random_lookup, small_blocks
from support.reference import ReferenceTables

CLIPS = [
    CowClip("none"),
    CowClip("row", threshold=0.02),
    CowClip("cowclip", ratio=0.3, bound=1e-2),
    CowClip("cowclip", ratio=0.3, bound=1e-2, variant="paper"),
]
RULES = [Adam(), Adam((0.5, 0.9), 1e-3, "torch")]


def fused_update_(backend, lookup, grad, lr, step, row_counts):
    """Both halves of a step of one array."""
    backend.step_queued_(backend.measure_queued(lookup, grad), lr, step, row_counts)


@pytest.fixture
def small(monkeypatch):
    """Several programs for a handful of rows."""
    sum_runs, update_rows_ = fused.sum_runs, fused.update_rows_

    def sized(function, place):
        return lambda *args, **kwargs: function(
            *args, **kwargs, sizes=small_blocks(args[place].shape[1])
        )

    monkeypatch.setattr(fused, "sum_runs", sized(sum_runs, 2))
    monkeypatch.setattr(fused, "update_rows_", sized(update_rows_, 0))


def make_array(rows, dim, setting, dtype=torch.float32):
    weights = torch.randn(rows, dim, generator=torch.Generator().manual_seed(5)) * 0.1
    # A row of zeros has no norm for a threshold.
    weights[0] = 0.0
    return TableArray.create([TableShard("t", rows)], weights.to(DEVICE, dtype), setting, dim)


def backend_of(array):
    return fused.TritonBackend(array, NonFiniteFlag(torch.device(DEVICE)))


def train(array, batches, lrs):
    backend = backend_of(array)
    row_counts = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for step, ((lookup, grad), lr) in enumerate(zip(batches, lrs, strict=True), 1):
        fused_update_(backend, lookup, grad, lr, step, row_counts)
    assert int(backend._flag) == 0
    return row_counts.tolist()


def assert_follows(setting, dim, batches):
    lrs = [1e-2 / step for step in range(1, len(batches) + 1)]
    rows = batches[0][0].rows
    array, plain = make_array(rows, dim, setting), make_array(rows, dim, setting)
    rule, clip = vars(setting.rule), vars(setting.clip)
    reference = ReferenceTables(
        {"t": array.weights.cpu()},
        l2=setting.l2,
        weight_decay=setting.weight_decay,
        rows="touched",
        **rule,
        **clip,
    )
    row_counts = train(array, batches, lrs)
    clipped = 0
    for step, ((lookup, grad), lr) in enumerate(zip(batches, lrs, strict=True), 1):
        sums, counts = dense(lookup, grad, dim)
        reference.step({"t": sums}, {"t": counts}, lr=lr)
        found = counts.nonzero().flatten()
        given_rows = RowGradients(
            *(part.to(DEVICE) for part in (found, sums[found].float(), counts[found]))
        )
        (outcome,) = update_([PendingUpdate(choose_backend(plain), given_rows, lr, step)])
        clipped += int(outcome.clipped)
    states = {"exp_avg": reference.first["t"], "exp_avg_sq": reference.second["t"]}
    for expected, name in ((reference.weights["t"], None), *((v, n) for n, v in states.items())):
        scale = float(expected.abs().max())
        for other in (array, plain):
            values = other.weights if name is None else other.states[name]
            torch.testing.assert_close(
                values.cpu().double(), expected, rtol=1e-4, atol=1e-6 * scale
            )
    assert row_counts == [reference.touched, reference.clipped, 0]
    assert clipped == reference.clipped


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    lookup=lookups(),
    dim=st.sampled_from([4, 12, 20, 64]),
    rule=st.sampled_from(RULES),
    clip=st.sampled_from(CLIPS),
    columns=st.sampled_from([None, 1, 3]),
    l2=st.sampled_from([0.0, 1e-5, 0.3]),
)
def test_any_lookup_follows_the_equations(lookup, dim, rule, clip, columns, l2):
    clip = CowClip(**{**vars(clip), "columns": columns})
    setting = UpdateSettings(rule, clip, l2=l2, rows="touched")
    assert_follows(setting, dim, [(lookup, random_gradient(lookup, dim, scale=0.05))] * 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(small, bad):
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


def test_rows_note_their_step(small, monkeypatch):
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
    train(arrays[0], [(lookup, grad)], [1e-2])
    train(arrays[1], [(lookup, wide[:, grad.shape[1] : 2 * grad.shape[1]])], [1e-2])
    assert all(map(torch.equal, arrays[0].all_tensors(), arrays[1].all_tensors()))


def test_a_copy_counts_no_rows():
    lookup = random_lookup()
    array = make_array(lookup.rows, 4, UpdateSettings())
    array.shards = (TableShard("t", lookup.rows, counted=False),)
    assert train(array, [(lookup, random_gradient(lookup, 4))], [1e-2]) == [0, 0, 0]


def test_a_batch_without_ids():
    lookup = random_lookup(longest=0)
    array = make_array(lookup.rows, 4, UpdateSettings())
    before = copy.deepcopy(array.all_tensors())
    assert train(array, [(lookup, random_gradient(lookup, 4))], [1e-2]) == [0, 0, 0]
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
def test_what_the_kernels_cannot_do_is_told(setting, dim, dtype, words):
    assert words in fused.why_not(make_array(12, dim, setting, dtype))
