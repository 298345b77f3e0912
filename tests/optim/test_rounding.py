"""Stochastic rounding: no bias, only the two neighbours, and the same bits under every plan."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from stampede.optim import CowClip
from stampede.optim.backends import choose_backend
from stampede.optim.rounding import random_unit, round_stochastically, table_key
from stampede.optim.rows import sum_by_row
from stampede.optim.rules import SGD, Adagrad, Adam, RowWiseAdam
from stampede.optim.table_array import PendingUpdate, TableArray, TableShard
from stampede.optim.update import update_
from stampede.optim.update_settings import UpdateSettings

LOW = [torch.float16, torch.bfloat16]
ROWS, COLUMNS = 4000, 32


def units(seed=0, table="t", rows=ROWS, columns=COLUMNS, step=1):
    keys = torch.full((rows,), table_key(seed, table))
    return random_unit(keys, torch.arange(rows), torch.arange(columns), step)


def neighbours(value, dtype):
    """The largest value of the dtype that is not above, the smallest that is not below."""
    if dtype == torch.float16:
        nearest = np.float16(value)
        with np.errstate(over="ignore"):
            below, above = (np.nextafter(nearest, np.float16(side)) for side in (-np.inf, np.inf))
        # Compared as Python's numbers: NumPy would round the value first.
        return (
            float(nearest if float(nearest) <= value else below),
            float(nearest if float(nearest) >= value else above),
        )
    # bfloat16 is float32's upper half: cutting goes towards zero, the next pattern away from it.
    bits = np.float32(value).view(np.uint32)
    cut = np.uint32(bits & 0xFFFF0000)
    inner = cut.view(np.float32)
    outer = inner if cut == bits else np.uint32(cut + 0x10000).view(np.float32)
    return tuple(sorted((float(inner), float(outer))))


@pytest.mark.parametrize(
    "dtype, value",
    [
        # Below 2**-14 fp16 is subnormal, with steps of 6e-8.
        *((torch.float16, v) for v in (3e-9, 1.3e-7, -4.1e-6, 6.1e-5, 1.23e-3, -0.1, 2.7, 777.7)),
        *((torch.bfloat16, v) for v in (1e-30, -4.1e-6, 1.23e-3, -0.1, 2.7, 777.7, 1e30)),
    ],
)
def test_rounding_has_no_bias(dtype, value):
    values = torch.full((ROWS, COLUMNS), value, dtype=torch.float32)
    # Four steps and two tables: as the numbers are drawn in training.
    units_drawn = [units(table=table, step=step) for table in "ab" for step in (1, 2, 3, 4)]
    found = torch.stack([round_stochastically(values, unit, dtype) for unit in units_drawn])
    errors = found.double() - values.double()
    assert float(errors.abs().max()) > 0
    low, high = neighbours(float(values[0, 0]), dtype)
    share = (float(values[0, 0]) - low) / (high - low)
    # The spread is known: a coin between two values.
    standard_error = (high - low) * math.sqrt(share * (1 - share) / errors.numel())
    assert abs(float(errors.mean())) < 5 * standard_error
    # What it is for: rounding to nearest is off by the whole error, always.
    assert abs(float(values[0, 0].to(dtype).double() - values[0, 0])) > 20 * standard_error


def test_random_numbers_are_uniform_and_independent():
    first = units()
    histogram = torch.histc(first, bins=64, min=0.0, max=1.0)
    expected = first.numel() / 64
    assert float((histogram - expected).square().sum() / expected) < 63 + 5 * math.sqrt(2 * 63)
    assert float(first.min()) >= 0.0 and float(first.max()) < 1.0
    centred = first - 0.5
    others = {
        "row": centred.roll(1, 0),
        "column": centred.roll(1, 1),
        "step": units(step=2) - 0.5,
        "seed": units(seed=1) - 0.5,
        "table": units(table="u") - 0.5,
    }
    for name, other in others.items():
        correlation = float((centred * other).mean() * 12)
        assert abs(correlation) < 5 / math.sqrt(first.numel()), name
        assert not torch.equal(centred, other), name


@hypothesis_settings(max_examples=400, deadline=None)
@given(
    dtype=st.sampled_from(LOW),
    value=st.floats(-65504.0, 65504.0, width=32),
    unit=st.integers(0, 2**24 - 1),
)
@example(torch.float16, 65503.0, 2**24 - 1)
@example(torch.float16, 2.0**-14 - 2.0**-30, 0)
@example(torch.float16, -(2.0**-24), 0)
@example(torch.bfloat16, 1.9999999, 0)
def test_the_result_is_one_of_the_two_neighbours(dtype, value, unit):
    if dtype == torch.bfloat16 and abs(value) < 2.0**-110:
        return
    drawn = torch.tensor([unit * 2.0**-24])
    found = float(round_stochastically(torch.tensor([value]), drawn, dtype))
    low, high = neighbours(value, dtype)
    if low == high:
        assert found == low
    else:
        # Up with the probability of the distance from below.
        exact = (value - low) / (high - low)
        assert found == (high if unit * 2.0**-24 < np.float32(exact) else low)


def array(dtype, shards, dim, values=None, **settings):
    if values is None:
        values = torch.ones(sum(shard.rows for shard in shards), dim)
    return TableArray.create(shards, values.to(dtype), UpdateSettings(**settings), dim)


@pytest.mark.parametrize("dtype", LOW)
def test_shards_get_the_bits_of_the_whole_table(dtype):
    draw = torch.Generator().manual_seed(0)
    values = {name: torch.randn(40, 12, generator=draw) for name in "ab"}
    whole = {
        name: array(dtype, [TableShard(name, 40)], 12).rounded(value, torch.arange(40), 7)
        for name, value in values.items()
    }
    # Parts of two tables in one array, in another order, with offsets of rows and columns.
    parts = [TableShard("b", 11, 5, 4), TableShard("a", 9, 31, 4), TableShard("b", 3, 20, 4)]
    pieces = [(part.table, slice(part.row_offset, part.row_offset + part.rows)) for part in parts]
    inputs = torch.cat([values[table][rows, 4:8] for table, rows in pieces])
    expected = torch.cat([whole[table][rows, 4:8] for table, rows in pieces])
    mixed = array(dtype, parts, 4)
    assert torch.equal(mixed.rounded(inputs, torch.arange(23), 7), expected)
    # And any selection of rows, as a batch has it.
    some = torch.tensor([0, 10, 11, 12, 19, 20, 22])
    assert torch.equal(mixed.rounded(inputs[some], some, 7), expected[some])
    renamed = [replace(part, table="c") for part in parts]
    for other, step in (
        (array(dtype, parts, 4, seed=1), 7), (mixed, 8), (array(dtype, renamed, 4), 7),
    ):  # fmt: skip
        assert not torch.equal(other.rounded(inputs, torch.arange(23), step), expected)


@pytest.mark.parametrize("rule", [Adam(), RowWiseAdam(), Adagrad(), SGD(), SGD(0.9)], ids=repr)
@pytest.mark.parametrize("rows", ["all", "touched"])
@pytest.mark.parametrize("dtype", LOW)
def test_each_step_is_the_float32_step_rounded_once(dtype, rows, rule):
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(60, 8, generator=draw) * 0.01
    shards = [TableShard("a", 40), TableShard("b", 20)]
    clip = CowClip(ratio=0.5, bound=1e-3, columns=6)
    settings = {"rule": rule, "l2": 1e-2, "rows": rows, "weight_decay": 0.1, "clip": clip}
    low = array(dtype, shards, 8, values=start, **settings)
    assert low.weights.dtype == dtype
    for step in range(1, 6):
        full = array(torch.float32, shards, 8, values=low.weights.float(), **settings)
        for name, state in full.states.items():
            state.copy_(low.states[name])
        ids = torch.randint(0, 60, (25,), generator=draw)
        batch = sum_by_row(ids, torch.randn(25, 8, generator=draw) * 0.01)
        for table in (low, full):
            update_([PendingUpdate(choose_backend(table), batch, lr=1e-3, step=step)])
        for name, state in low.states.items():
            assert state.dtype == torch.float32
            # Arithmetic is float32's; only fused and plain kernels differ in the last bits.
            torch.testing.assert_close(state, full.states[name], rtol=1e-5, atol=1e-10)
        exact = full.weights.double()
        unit = 2.0 ** (exact.abs().log2().floor() - (10 if dtype == torch.float16 else 7))
        if dtype == torch.float16:
            unit = unit.clamp_min(2.0**-24)
        assert bool(((low.weights.double() - exact).abs() <= unit * (1 + 1e-3)).all())
        # It is a step, not a copy: something was rounded up and something down.
        assert bool((low.weights.double() > exact).any() and (low.weights.double() < exact).any())
