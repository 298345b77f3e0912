"""The Triton kernels against float64, what they are compiled to, and what queued steps refuse."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from stampede.optim import CowClip
from stampede.optim.backends import triton as fused
from stampede.optim.lookup import LookedUpGradients
from stampede.optim.nonfinite import NonFiniteFlag
from stampede.optim.rules import SGD, Adam, RowWiseAdam, step_constants
from stampede.optim.table_array import PendingUpdate, TableArray, TableShard
from stampede.optim.triton import MANY_OCCURRENCES, block_sizes, steps, sum_runs
from stampede.optim.triton.steps import Missed, catch_up_range_, catch_up_rows_
from stampede.optim.update import update_
from stampede.optim.update_settings import UpdateSettings
from support.lookups import DEVICE, dense, lookups, random_gradient, random_lookup, small_blocks
from support.paths import ROOT


@pytest.fixture(scope="module", autouse=True)
def _small_blocks():
    """Several programs of the kernels for a handful of rows."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (steps, sum_runs):
            patch.setattr(module, "block_sizes", lambda dim, _: small_blocks(dim))
        yield


def test_tiles_are_powers_of_two_that_hold_a_row():
    for dim, occurrences in product(range(4, 257, 4), (0, 1, 1 << 20, MANY_OCCURRENCES)):
        sizes = block_sizes(dim, occurrences)
        assert all(size >= 1 and size & (size - 1) == 0 for size in asdict(sizes).values())
        assert dim <= sizes.columns < 2 * dim
        assert sizes.together <= sizes.window
        # Registers of a thread, with several values an element.
        for elements, warps in (
            (sizes.together * sizes.columns, sizes.window_warps),
            (sizes.runs * sizes.columns, sizes.run_warps),
            (sizes.rows * sizes.columns, sizes.row_warps),
            (sizes.elements, sizes.element_warps),
        ):
            assert elements // (32 * warps) <= 16


def assert_sums(lookup, dim, clipped, l2, grad=None):
    grad = random_gradient(lookup, dim) if grad is None else grad
    weights = torch.randn(lookup.rows, dim, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    setting = UpdateSettings(clip=CowClip(columns=clipped), l2=l2)
    array = TableArray.create([TableShard("t", lookup.rows)], weights, setting, dim)
    nonfinite = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = sum_runs.sum_runs(lookup.runs, grad.reshape(-1, dim), array, nonfinite)
    expected, counts = dense(lookup, grad, dim)
    rows = counts.nonzero().flatten()
    w = weights.cpu().double()[rows]
    expected = expected[rows] + 2 * l2 * w
    grads, squares = (t.cpu().double() for t in (found.grads, found.squares))
    atol = 1e-5 * float(counts.max())
    torch.testing.assert_close(grads[: len(rows)], expected, rtol=1e-5, atol=atol)
    parts = expected[:, :clipped], expected[:, clipped:], w[:, :clipped]
    exact = torch.stack([part.square().sum(1) for part in parts])
    torch.testing.assert_close(squares[:, : len(rows)], exact, rtol=1e-4, atol=1e-4)
    assert int(nonfinite) == 0
    return found


@pytest.mark.wide
@settings(max_examples=40, deadline=None)
@given(lookup=lookups(), dim=st.sampled_from([4, 12, 20, 64]), data=st.data())
def test_sums_of_any_lookup(lookup, dim, data):
    clipped = data.draw(st.sampled_from([dim, dim - 1, dim - 3]))
    assert_sums(lookup, dim, clipped, data.draw(st.sampled_from([0.0, 0.3])))


@pytest.mark.parametrize(
    "batch, weighted", [(1, False), (4, True), (5, True), (8, True), (63, False)]
)
def test_an_id_of_every_sample_crosses_windows(batch, weighted):
    """Windows of 4, two at a time; table 0 has rows before and behind the hot one."""
    lookup = random_lookup(batch=batch, longest=1, hot=3, weighted=weighted, mean=weighted)
    assert_sums(lookup, 12, 10, 1e-2)


def test_a_gradient_in_half_precision():
    lookup = random_lookup()
    assert_sums(lookup, 12, 12, 0.0, random_gradient(lookup, 12).half())


def test_bits_do_not_vary():
    lookup = random_lookup(batch=40, hot=1)
    one, other = (assert_sums(lookup, 12, 12, 0.1) for _ in range(2))
    number = int(lookup.runs.count)
    assert torch.equal(one.grads[:number], other.grads[:number])
    assert torch.equal(one.squares[:, :number], other.squares[:, :number])


BETAS = (0.9, 0.99)
ROWS = 11


def rate(step):
    """Learning rates change, as in a warm-up."""
    return 1e-2 * (1 + step % 3) / 3


def steps_after(first, until, now, l2, placement="keras", decay=0.1):
    """The steps after `first` up to `now`, and more, up to `until`, that no row takes yet."""
    rule = Adam(BETAS, 1e-5, placement)
    constants = [step_constants(rule, rate(n), n, decay) for n in range(first + 1, until + 1)]
    constants = torch.tensor(constants, dtype=torch.float32, device=DEVICE).reshape(-1, 3)
    return Missed(
        constants, first, now, BETAS, l2, torch.zeros(1, dtype=torch.int32, device=DEVICE)
    )


def random_state(dim, since, seed=0):
    draw = torch.Generator().manual_seed(seed)
    w, m, v = (torch.randn(ROWS, dim, generator=draw) * 0.1 for _ in range(3))
    return [t.to(DEVICE) for t in (w, m, v.square(), since.int())]


def dense_loop(state, now, l2, placement="keras", decay=0.1):
    """In float64, every row on its own; Adam as it is written in the papers."""
    *moving, since = state
    w, m, v = (t.cpu().double() for t in moving)
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
    return w, m, v, torch.full((ROWS,), now, dtype=torch.float64)


@pytest.mark.parametrize("placement", ["keras", "torch"])
@pytest.mark.parametrize("dim", [4, 12, 20])
def test_replay_is_the_dense_loop_with_changing_learning_rates(dim, placement):
    """Of a range of rows; the others stay."""
    state = random_state(dim, torch.arange(ROWS) % 4 + 2)
    before = [t.clone() for t in state]
    expected = dense_loop(state, 9, l2=0.05, placement=placement)
    catch_up_range_(state, 2, 7, steps_after(2, 12, 9, 0.05, placement))
    for found, was, whole in zip(state, before, expected, strict=True):
        atol = 1e-6 * float(whole[2:7].abs().max())
        torch.testing.assert_close(found[2:7].cpu().double(), whole[2:7], rtol=1e-4, atol=atol)
        assert torch.equal(found[:2], was[:2]) and torch.equal(found[7:], was[7:])


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
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
    at_once, in_pieces = (random_state(dim, since.clone(), seed) for _ in range(2))
    catch_up_range_(at_once, 0, ROWS, steps_after(0, 12, 12, l2))
    last = in_pieces[3]
    listed = torch.randperm(ROWS, generator=draw)[:6].sort().values.to(DEVICE)
    count = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    for now in [*sorted(cuts), 12]:
        catch_up_rows_(in_pieces, listed, count, steps_after(0, 12, now, l2))
        assert (last[listed[:4]] == torch.clamp(since[listed[:4]], min=now)).all()
        assert torch.equal(last[listed[4:]], since[listed[4:]])
    # A window of steps that begins later.
    earliest = int(last.min())
    catch_up_range_(in_pieces, 0, ROWS, steps_after(earliest, 12, 12, l2))
    assert all(map(torch.equal, at_once, in_pieces))


@pytest.mark.wide
def test_what_the_kernels_are_compiled_to(tmp_path):
    """How often instructions occur in each kernel; compiling needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "ignore", "-m", "support.compile_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    code = json.loads(done.stdout)
    assert len(code) == 10
    for name, words in code.items():
        assert words["approx"] == words["div.full"] == words[".ftz"] == 0, name
    # Of each element everywhere: three fused additions, a root and a quotient.
    for name in ("update False", "replay True", "replay False"):
        words = code[name]
        assert words["fma.rn.f32"] == 3 * words["div.rn.f32"] > 0, name
        assert words["sqrt.rn.f32"] == words["div.rn.f32"], name


def make_array(rows, dim, setting, dtype=torch.float32):
    weights = torch.randn(rows, dim, generator=torch.Generator().manual_seed(5)) * 0.1
    # A row of zeros has no norm for a threshold.
    weights[0] = 0.0
    return TableArray.create([TableShard("t", rows)], weights.to(DEVICE, dtype), setting, dim)


def queued(array, flag, lookup, grad):
    backend = fused.TritonBackend(array, flag)
    return PendingUpdate(backend, LookedUpGradients(lookup, grad), 1e-2, 1)


@pytest.mark.parametrize("bad", [float("nan"), 1e30])
def test_arrays_that_are_updated_together_stay_together(bad):
    lookup = random_lookup()
    arrays = [make_array(lookup.rows, 12, UpdateSettings()) for _ in range(2)]
    before = copy.deepcopy([array.all_tensors() for array in arrays])
    flag, updates = NonFiniteFlag(torch.device(DEVICE)), []
    for position, array in enumerate(arrays):
        grad = random_gradient(lookup, 12)
        if position == 1:
            grad[:, 0] = bad
        updates.append(queued(array, flag, lookup, grad))
    assert not torch.stack(update_(updates)).any()
    for array, whole in zip(arrays, before, strict=True):
        assert all(map(torch.equal, array.all_tensors(), whole))


@pytest.mark.parametrize("counted", [True, False])
def test_a_copy_counts_no_rows(counted):
    lookup = random_lookup()
    array = make_array(lookup.rows, 4, UpdateSettings())
    array.shards = (TableShard("t", lookup.rows, counted=counted),)
    flag = NonFiniteFlag(torch.device(DEVICE))
    (row_counts,) = update_([queued(array, flag, lookup, random_gradient(lookup, 4))])
    assert bool(row_counts.any()) == counted


@pytest.mark.parametrize(
    "setting, dim, dtype, words",
    [
        (UpdateSettings(RowWiseAdam()), 4, torch.float32, "RowWiseAdam, not Adam"),
        (UpdateSettings(SGD()), 4, torch.float32, "SGD, not Adam"),
        (UpdateSettings(on_nonfinite="skip_row"), 4, torch.float32, "'skip_row'"),
        (UpdateSettings(), 4, torch.bfloat16, "bfloat16, not float32"),
        (UpdateSettings(), 6, torch.float32, "6 columns"),
        (UpdateSettings(), 260, torch.float32, "260 columns"),
    ],
)
def test_why_the_kernels_cannot_update_an_array(setting, dim, dtype, words):
    assert words in fused.why_not(make_array(12, dim, setting, dtype))
