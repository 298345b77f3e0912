"""The products of ReLU layers against plain torch in float64."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede import native_library
from stampede.engine.job.threads import using_threads
from stampede.models import cpu

DTYPES = [torch.float32, torch.bfloat16]
CPU = Path("/proc/cpuinfo")


def relu_layer(inputs, weight, bias):
    return cpu.relu_layers(inputs, [weight], [bias])[0]


needs_tiles = pytest.mark.skipif(
    not CPU.exists()
    or "amx_bf16" not in CPU.read_text()
    or any(flag.startswith("-mno-") for flag in native_library._FLAGS),
    reason="a CPU without AMX, or kernels compiled for one",
)


def drawn(seed, *shapes):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def assert_rounded(found, exact, summands):
    """Check a sum of products: its rounding is as large as the sum of their absolute values."""
    unit = 1e-6 if found.dtype == torch.float32 else 2**-8
    bound = 1e-6 * summands + unit * exact.abs() + 1e-37
    assert found.shape == exact.shape and ((found.double() - exact).abs() <= bound).all()


def assert_product(found, a, b, mask=None):
    """Check `a @ b`, zero where the mask is not above 0."""
    kept = 1.0 if mask is None else (mask > 0).double()
    a, b = a.double(), b.double()
    assert_rounded(found, (a @ b) * kept, a.abs() @ b.abs())


ROWS = st.sampled_from([1, 2, 31, 32, 33, 63, 65, 200, 1100])
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([128, 273]))


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    columns=WIDTHS,
    outputs=WIDTHS,
    scale=st.sampled_from([1.0, 1e-30, 1e-15, 1e15]),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_products_of_a_layer(rows, columns, outputs, scale, dtype, threads, seed):
    shapes = (rows, columns), (outputs, columns), (outputs,), (rows, outputs)
    inputs, weight, bias, grad = drawn(seed, *shapes)
    weight, bias = weight.to(dtype).float(), (bias * scale).to(dtype).float()
    inputs, grad = (inputs * scale).to(dtype), (grad * scale).to(dtype)
    with using_threads(threads):
        output = relu_layer(inputs, weight, bias)
        plain = cpu.inputs_gradient(grad, weight)
        masked, sums = cpu.masked_inputs_gradient(grad, weight, inputs, scale=2.0)
        of_weight = cpu.transposed_product(grad, inputs)
    assert output.dtype == plain.dtype == masked.dtype == dtype and sums.dtype == torch.float32
    before = inputs.double() @ weight.double().t() + bias
    summands = inputs.double().abs() @ weight.double().abs().t() + bias.abs()
    assert_rounded(output, before.relu(), summands)
    assert_product(plain, grad, weight)
    assert_product(masked, 2 * grad, weight, inputs)
    # Sums are of what was not yet rounded to bfloat16, or of what was.
    error = 1e-5 if dtype == torch.float32 else 2**-8
    atol = error * masked.abs().sum().item() + 1e-6 * scale
    torch.testing.assert_close(sums.double(), masked.double().sum(0), rtol=0, atol=atol)
    assert_product(of_weight, grad.t(), inputs)


@needs_tiles
def test_tiles_are_used_where_there_are_some():
    assert cpu.has_tiles()
    # Where torch multiplies bfloat16 it also rounds to it.
    a, b = (tensor.bfloat16() for tensor in drawn(0, (64, 40), (64, 30)))
    assert cpu.transposed_product(a, b).dtype == torch.float32


@needs_tiles
@pytest.mark.parametrize("rows, columns, outputs", [(512, 400, 400), (300, 273, 64)])
def test_float32_products_are_as_exact_as_torchs(rows, columns, outputs):
    inputs, weight, grad = drawn(1, (rows, columns), (outputs, columns), (rows, outputs))

    def error(found, exact):
        return (found.double() - exact).square().mean().sqrt()

    for ours, a, b in (
        (cpu.inputs_gradient(grad, weight), grad, weight),
        (cpu.transposed_product(grad, inputs), grad.t(), inputs),
    ):
        exact = a.double() @ b.double()
        assert error(ours, exact) <= 1.1 * error(a @ b, exact)
    # Numbers that bfloat16 holds would not show what the other parts are for.
    assert not torch.equal(inputs, inputs.bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(dtype, bad):
    inputs, weight = drawn(3, (40, 20), (33, 20))
    inputs[7, 3] = bad
    inputs, weight = inputs.to(dtype), weight.abs()
    output = relu_layer(inputs, weight, torch.zeros(33))
    # An infinite sum may be NaN in tiles; never is it a number above 0 or hidden as such.
    assert (~output[7].isfinite() | (output[7] == 0)).all()
    if bad != float("-inf"):
        assert not output[7].isfinite().any()
    others = [row for row in range(40) if row != 7]
    assert output[others].isfinite().all()
    sums = cpu.transposed_product(output, inputs)
    assert not sums[:, 3].isfinite().any() or bad == float("-inf")
    masked, _ = cpu.masked_inputs_gradient(output[others].contiguous(), weight, inputs[others])
    assert masked.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_takes_the_memory_of_its_mask_in_which_a_nan_hides_nothing(dtype):
    grad, weight, mask = drawn(5, (70, 20), (20, 33), (70, 33))
    mask[5, 6] = float("nan")
    grad, mask = grad.to(dtype), mask.to(dtype)
    expected, sums = cpu.masked_inputs_gradient(grad, weight, mask)
    assert expected[5, 6] != 0
    found, others = cpu.masked_inputs_gradient(grad, weight, mask, into_mask=True)
    assert found.data_ptr() == mask.data_ptr() != expected.data_ptr()
    assert torch.equal(found, expected) and torch.equal(others, sums)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_columns_or_no_rows(dtype):
    bias = torch.tensor([1.0, -1.0])
    output = relu_layer(torch.ones(3, 0, dtype=dtype), torch.ones(2, 0), bias)
    assert torch.equal(output.float(), bias.relu().expand(3, 2))
    inputs, weight, bias = torch.zeros(0, 5, dtype=dtype), torch.ones(3, 5), torch.ones(3)
    assert relu_layer(inputs, weight, bias).shape == (0, 3)
    grad = torch.zeros(0, 3, dtype=dtype)
    assert cpu.inputs_gradient(grad, weight).shape == (0, 5)
    assert torch.equal(cpu.transposed_product(grad, inputs).float(), torch.zeros(3, 5))


@needs_tiles
def test_widths_that_do_not_match_are_refused():
    with pytest.raises(RuntimeError, match="shapes of the factors"):
        relu_layer(torch.ones(2, 3), torch.ones(4, 5), torch.ones(4))
