"""Dropout by sample: kernels, plain torch and NumPy draw the same masks, however a batch is cut."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from stampede.models import NetworkShape
from stampede.models.dropout import draw_by_sample, dropped, sample_keys
from stampede.models.mlp import MLP, HiddenLayers
from stampede.native_library import switched_off
from support.dense import PRECISIONS, assert_near, autocast

U32, U64 = np.uint32, np.uint64


def split_mix(state):
    """SplitMix64's output of a state, as Vigna's C code."""
    with np.errstate(over="ignore"):
        z = (state ^ (state >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
        return z ^ (z >> U64(31))


def kept_by_numpy(keys, mask, elements, p):
    golden = U64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = split_mix(keys.numpy().astype(U64) + U64(mask) * golden)[:, None]
        x = np.arange(elements, dtype=U32) * U32(0x9E3779B1) + (key & U64(0xFFFFFFFF)).astype(U32)
        x = (x ^ (x >> U32(16))) * U32(0x85EBCA6B) ^ (key >> U64(32)).astype(U32)
        x = (x ^ (x >> U32(13))) * U32(0xC2B2AE35)
        return torch.from_numpy((x ^ (x >> U32(16))) / 2**32 >= p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 33), (1, 1), (70, 400), (0, 4)])
def test_the_kernel_plain_torch_and_numpy_draw_the_same(shape, dtype):
    keys = sample_keys(1, 2, torch.arange(shape[0]) * 10**12)
    with switched_off():
        assert torch.equal(keys, sample_keys(1, 2, torch.arange(shape[0]) * 10**12))
    values = torch.randn(shape).to(dtype)
    found = []
    for off in (False, True):
        given = values.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            if off:
                with switched_off():
                    out = dropped(given, keys, 3, 0.3)
            else:
                out = dropped(given, keys, 3, 0.3)
        out.sum().backward()
        found.append((out.detach(), given.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    if shape[0]:
        kept = kept_by_numpy(keys, 3, values[0].numel(), 0.3).view(shape)
        exact = values.double() * kept / (1 - 0.3)
        assert torch.equal(found[0][0] != 0, kept & (values != 0))
        torch.testing.assert_close(found[0][0].double(), exact.to(dtype).double())


def test_the_share_that_is_dropped_and_that_masks_are_unrelated():
    keys = sample_keys(5, 1, torch.arange(4000))
    masks = torch.stack(
        [
            *(dropped(torch.ones(4000, 64), keys, mask, 0.2) == 0 for mask in (1, 2)),
            dropped(torch.ones(4000, 64), sample_keys(5, 2, torch.arange(4000)), 1, 0.2) == 0,
        ]
    ).double()
    # Of 256,000 draws: five standard errors.
    assert masks.mean((1, 2)).sub(0.2).abs().max() < 5 * (0.2 * 0.8 / 256_000) ** 0.5
    # By column 4,000 draws, by row 64: the variance of binomial counts.
    assert masks[0].mean(1).var() == pytest.approx(0.2 * 0.8 / 64, rel=0.1)
    assert masks[0].mean(0).sub(0.2).abs().max() < 5 * (0.2 * 0.8 / 4000) ** 0.5
    flat = masks.flatten(1)
    related = torch.corrcoef(torch.cat([flat, flat[:1].roll(1, 1), flat[:1].roll(64, 1)]))
    assert related.fill_diagonal_(0).abs().max() < 5 / 256_000**0.5


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("has_output", [True, False])
def test_hidden_layers_against_float64(has_output, precision):
    torch.manual_seed(3)
    mlp = MLP(6, NetworkShape(0, 0, 6, (40, 30), dropout=0.25), torch.Generator().manual_seed(0))
    for parameter in mlp.parameters():
        # Of one sign, so that a rounding does not decide what a ReLU does.
        parameter.data.uniform_(0.1, 0.5)
    draws, wide = draw_by_sample(mlp), copy.deepcopy(mlp).double()
    inputs = torch.rand(70, 6).bfloat16().float().requires_grad_()
    keys = sample_keys(1, 2, torch.arange(70))
    draws.begin(keys)
    module = mlp if has_output else mlp.hidden
    with autocast(precision):
        found = module(inputs)
    assert any("_ReluLayers" in one.name() for one in _graph(found.grad_fn))
    grad = torch.rand(found.shape).bfloat16()
    found.backward(grad.to(found.dtype))
    x = exact = inputs.detach().double().requires_grad_()
    for number, layer in enumerate(wide.hidden._mlp):
        width = layer._linear.out_features
        kept = kept_by_numpy(keys, number + 1, width, 0.25)
        exact = torch.relu(layer._linear(exact)) * kept / (1 - 0.25)
    exact = wide.output(exact).squeeze(1) if has_output else exact
    exact.backward(grad.double())
    assert_near(found.detach(), exact.detach(), precision)
    assert_near(inputs.grad, x.grad, precision)
    for one, other in zip(module.parameters(), wide.parameters(), strict=False):
        assert_near(one.grad, other.grad, precision)


def _graph(node):
    found = [node]
    for one in found:
        found += [below for below, _ in one.next_functions if below is not None]
    return found


def test_modules_of_the_users_are_replaced_wherever_they_are():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.1)))
            self.attention = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)

    own, shared = Own(), nn.Dropout(0.5)
    own.twice = nn.Sequential(shared, nn.Linear(4, 4), shared)
    draws = draw_by_sample(own)
    assert own.twice[0] is own.twice[2] and type(own.twice[2]) is not nn.Dropout
    assert not [module for module in own.modules() if type(module) is nn.Dropout]
    values, keys = torch.ones(6, 4), sample_keys(0, 1, torch.arange(6))
    draws.begin(keys)
    first, second = own.dropout(values), own.dropout(values)
    assert not torch.equal(first, second)
    draws.begin(keys)
    assert torch.equal(own.dropout(values), first)
    assert torch.equal(own.eval().dropout(values), values)
    assert draw_by_sample(HiddenLayers(4, [4])) is None


def test_samples_that_are_folded_into_the_first_dimension():
    keys, values = sample_keys(0, 1, torch.arange(6)), torch.ones(6 * 5, 4)
    whole = dropped(values, keys, 1, 0.5)
    parts = [dropped(values[:10], keys[:2], 1, 0.5), dropped(values[10:], keys[2:], 1, 0.5)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.wide
def test_compiled_masks_are_the_same():
    network = MLP(4, NetworkShape(0, 0, 4, (8, 8), dropout=0.5), torch.Generator().manual_seed(0))
    draws, inputs = draw_by_sample(network), torch.randn(16, 4)
    outputs = []
    for compiled in (False, True):
        if compiled:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            network.compile(dynamic=False, fullgraph=True)
        for step in (1, 2, 3):
            draws.begin(sample_keys(0, step, torch.arange(16)))
            outputs.append(network(inputs))
    torch.testing.assert_close(outputs[3:], outputs[:3])
    # The second and third step run what the first one compiled.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
