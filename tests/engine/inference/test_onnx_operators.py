"""Operators of torch, written as ONNX, compute in onnxruntime what torch computes."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

from stampede.engine.errors import RunFolderError
from stampede.engine.inference.onnx_operators import Graph, add_program
from support.onnx_files import dense_session

# Of rows `[n, 3, 4]` and numbers `[n, 2]`; any shape `[n, ...]` comes out.
FUNCTIONS = {
    "add": lambda r, x: r[:, 0, :2] + x + 1,
    "add with alpha": lambda r, x: torch.add(r[:, 0, :2], x, alpha=3),
    "subtract": lambda r, x: 1 - r - r.mean(),
    "divide by a size": lambda r, x: r / len(r),
    "sizes": lambda r, x: torch.zeros(len(r) * 2 + 1, 4)[: len(r)] + r[:, 0],
    "whole numbers divided": lambda r, x: (x * 3).long() / 2,
    "powers": lambda r, x: r**2 + r.abs() ** x[:, :1, None] + 2**r,
    "roots": lambda r, x: r.abs().sqrt() + (r.abs() + 1).rsqrt(),
    "exponentials": lambda r, x: r.exp() + (r.abs() + 0.1).log() + torch.log1p(r.abs()),
    "rounding": lambda r, x: (r * 4).round() + r.floor() + r.ceil() + r.sign(),
    "angles": lambda r, x: r.sin() + r.cos() + r.atan() + r.tanh() + r.tan(),
    "comparisons": lambda r, x: (r > 0.5).float() + (r <= 0) + (r != 0) + (r == r) + (r < x[0, 0]),
    "comparison of types": lambda r, x: (r.long() >= 0.5).float(),
    "logic": lambda r, x: ((r > 0) & ~(r > 1) | (r < -1)).float(),
    "any": lambda r, x: (r > 1).any(2).float() + (r > 9).any(),
    "all": lambda r, x: (r > -1).all(2).float(),
    "where": lambda r, x: torch.where(r > 0, r, -1.5),
    "masked fill": lambda r, x: r.masked_fill(r > 1, float("-inf")).softmax(2),
    "clamp": lambda r, x: r.clamp(-0.5, 0.5) + r.clamp(min=0.1) + r.clamp(max=x[:, :1, None]),
    "maximum": lambda r, x: torch.maximum(r, -r) + torch.minimum(r, r * 2),
    "sums": lambda r, x: r.sum(2) + r.mean((1, 2), keepdim=True).squeeze(2) + r.amax(1)[:, :3],
    "least and product": lambda r, x: r.amin(2) + r.prod(2),
    "spread": lambda r, x: r.std(2) + r.var(1, unbiased=False)[:, :3],
    "sum of powers": lambda r, x: r.norm(dim=2) + torch.logsumexp(r, 2),
    "softmax": lambda r, x: r.softmax(1) + r.log_softmax(2),
    "relu": lambda r, x: functional.relu(r) + functional.leaky_relu(r, 0.2) + functional.relu6(r),
    "elu": lambda r, x: functional.elu(r, 0.7) + functional.selu(r),
    "gelu": lambda r, x: functional.gelu(r) + functional.silu(r) + functional.mish(r),
    "softplus": lambda r, x: functional.softplus(r) + functional.logsigmoid(r),
    "hard": lambda r, x: functional.hardtanh(r) + functional.hardsigmoid(r) + torch.erf(r),
    "products": lambda r, x: r @ r.transpose(1, 2),
    "einsum": lambda r, x: torch.einsum("bij,bkj->bik", r, r),
    "matrix and bias": lambda r, x: torch.addmm(torch.ones(4), x, torch.ones(2, 4), alpha=2),
    "layer norm": lambda r, x: functional.layer_norm(r, [4]),
    "shapes": lambda r, x: r.reshape(-1, 2).view(len(r), 12).unflatten(1, (3, -1)).flatten(1),
    "expanded": lambda r, x: x.unsqueeze(1).expand(-1, 3, 2) + x[:, None].repeat(1, 3, 1),
    "repeated": lambda r, x: x.sum(0).repeat(len(x), 1),
    "squeezed": lambda r, x: r[:, :1].squeeze(1) + r[:, :1].squeeze(),
    "stacked": lambda r, x: torch.stack([x, x * 2], 1).permute(0, 2, 1),
    "split": lambda r, x: torch.cat([part * i for i, part in enumerate(r.split([1, 3], 2))], 2),
    "chunks": lambda r, x: torch.cat(list(r.chunk(2, 2))[::-1], 2) + r.unbind(1)[-1][:, None],
    "slices": lambda r, x: r[:, 1:, ::2] + r[:, -1:, -2:],
    "padded": lambda r, x: functional.pad(r, [1, 2, 0, 1], value=0.5),
    "zero wide": lambda r, x: torch.cat([x, x[:, :0], r.flatten(1)[:, :0]], 1),
    "places": lambda r, x: r[:, [2, 0]],
    "pairs of places": lambda r, x: r[:, torch.tensor([0, 2]), torch.tensor([-1, 1])],
    "gathered": lambda r, x: r.gather(2, (r > 0).long()),
    "selected": lambda r, x: r.index_select(1, torch.tensor([1, 1])),
    "embedded": lambda r, x: functional.embedding((x > 0).long(), torch.tensor([[1.0], [2.0]])),
    "ranges": lambda r, x: torch.arange(4) * r + torch.full_like(r, 2.5) + torch.ones(4),
    "triangle": lambda r, x: (r @ r.transpose(1, 2)).tril(-1),
    "other types": lambda r, x: (r.double() * 2).float() + r.half().float(),
}


class Functions(nn.Module):
    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, rows, numbers):
        found = [f(rows, numbers).float() for f in self.functions]
        return torch.cat([one.reshape(len(rows), -1) for one in found], 1)


def exported(functions):
    samples = Dim("samples", min=1)
    inputs = torch.zeros(4, 3, 4), torch.zeros(4, 2)
    shapes = {"rows": {0: samples}, "numbers": {0: samples}}
    return torch.export.export(Functions(functions), inputs, dynamic_shapes=shapes, strict=True)


@pytest.mark.slow
def test_operators_compute_what_torch_does():
    """All in one program, which is written in a tenth of the time of one for each."""
    session = dense_session(exported(list(FUNCTIONS.values())), 2, ("n", None))
    for samples in (2, 7):
        generator = torch.Generator().manual_seed(samples)
        rows = torch.randn(samples, 3, 4, generator=generator)
        rows[0, 0] = torch.tensor([0.0, -0.5, 1.5, 2.5])
        numbers = torch.randn(samples, 2, generator=generator)
        (found,) = session.run(None, {"rows": rows.numpy(), "numbers": numbers.numpy()})
        at = 0
        for name, function in FUNCTIONS.items():
            expected = function(rows, numbers).float().reshape(samples, -1)
            columns = torch.from_numpy(found[:, at : at + expected.shape[1]])
            at += expected.shape[1]
            torch.testing.assert_close(
                columns, expected, atol=2e-6, rtol=2e-6, equal_nan=True, msg=lambda m, n=name: n + m
            )
        assert at == found.shape[1]


@pytest.mark.parametrize(
    "function, words",
    [
        (
            lambda r, x: torch.linalg.det(r[:, :, :3]),
            "aten._linalg_det.default has no translation",
        ),
        (
            lambda r, x: x.div(2, rounding_mode="trunc"),
            "aten.div.Tensor_mode with rounding_mode='trunc' has no",
        ),
        (
            lambda r, x: functional.gelu(x, approximate="tanh"),
            "aten.gelu.default with approximate='tanh' has no",
        ),
        (
            lambda r, x: r[:, torch.tensor([[0]])],
            "aten.index.Tensor with an index of several dimensions has",
        ),
        (lambda r, x: x.bfloat16(), "aten._to_copy.default of torch.bfloat16 has no"),
    ],
)
def test_what_is_not_known_is_named(function, words):
    with pytest.raises(
        RunFolderError, match=f"cannot be written as ONNX: .*{words}.*--format onnx"
    ):
        add_program(Graph(), exported([function]), ["rows", "numbers"])
