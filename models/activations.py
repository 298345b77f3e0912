# pyright: basic
"""Activations of hidden layers besides ReLU, with C++ kernels in training on a CPU."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from stampede.models import cpu
from stampede.models.batch_norm import GlobalBatchNorm, mean_over_ranks
from stampede.models.mlp import HiddenLayers
from stampede.models.options import Activation

_OPS = torch.ops.stampede_dense


class PReLU(nn.PReLU):
    """`nn.PReLU` with a slope for each column."""

    def forward(self, input: Tensor) -> Tensor:
        """`[n, width]` from `[n, width]`."""
        if cpu.trains_in_float32(input, self.weight):
            # Autocast would round the outputs.
            with torch.autocast("cpu", enabled=False):
                return _PReLU.apply(input.float(), self.weight)
        return super().forward(input)


class Dice(nn.Module):
    """`p * x + (1 - p) * alpha * x` with `p = sigmoid((x - mean) / sqrt(variance + eps))`.

    Of DIN (arXiv 1706.06978, eq. 3), whose eps it has. Mean and variance of each column are over
    all rows of the global batch: samples, or in a unit of attention the ids of their histories.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(width, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, output: nn.Linear | None = None) -> Tensor:
        """`[n, width]` from `[n, width]`; with a layer of one output, what it then gives."""
        norm, column, bias = self.norm, None, None
        if output is not None:
            column, bias = output.weight, output.bias
        if (
            isinstance(norm, GlobalBatchNorm)
            and norm.training
            and cpu.trains_in_float32(x, self.alpha)
        ):
            x = x.float()
            given = (column, *norm.of_batch(x), norm.eps, norm.ranks)
            found = _Dice.apply(x, self.alpha, *given)
            return found if bias is None else found + bias
        share = torch.sigmoid(norm(x))
        found = x * (share + (1 - share) * self.alpha)
        return found if output is None else output(found)


class _PReLU(torch.autograd.Function):
    """PReLU in torch, whose backward pass is C++."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, alpha)
        return torch.prelu(x, alpha)

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _OPS.prelu_backward(grad.contiguous(), *ctx.saved_tensors)


class _Dice(torch.autograd.Function):
    """Dice in C++, with the statistics of a batch, and perhaps an output `[1, width]`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        alpha: Tensor,
        output: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        ranks: int,
    ) -> Tensor:
        x, ctx.ranks = x.contiguous(), ranks
        output = None if output is None else output.contiguous()
        given = x, mean, (variance + eps).rsqrt(), alpha, output
        ctx.save_for_backward(count, *given)
        return _OPS.dice(*given)

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count, *given = ctx.saved_tensors
        grad = grad.contiguous()
        sums = _OPS.dice_sums(grad, *given)
        means = mean_over_ranks(sums[:2], count, ctx.ranks)
        of_x = _OPS.dice_backward(grad, *given, means.float())
        of_output = None if given[-1] is None else sums[3:].clone()
        return of_x, sums[2].clone(), of_output, *[None] * 5


_KINDS = {"prelu": PReLU, "dice": Dice}


def activate(hidden: HiddenLayers, activation: Activation) -> None:
    """Replace the ReLU of layers, which keep their normalization and dropout."""
    if activation == "relu":
        return
    layers: Any = hidden._mlp
    for layer in layers:
        found = layer._activation_fn
        parts = found.named_children() if isinstance(found, nn.Sequential) else [("", nn.ReLU())]
        # Of one name, whether the layer has a norm and dropout or not.
        layer._activation_fn = nn.Sequential(
            OrderedDict(
                ("activation", _KINDS[activation](layer._linear.out_features))
                if isinstance(part, nn.ReLU)
                else (name, part)
                for name, part in parts
            )
        )
